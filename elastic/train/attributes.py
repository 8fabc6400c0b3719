"""Plain attributes of modules and data, which are part of the state of a boundary.

A script, a ``forward`` or a dataset sets numbers and flags when their time has come:
``dropout.p = 0.1`` at the third epoch, ``norm.eval()`` or ``dataset.mosaic = False`` from then on,
``self.steps += 1``. They are in no ``state_dict``, and decide later weights all the same. So those
that training has changed are kept, sent and saved with the weights. All others are the script's
own: what it sets before its first loop, it sets in each process, and they may differ by rank.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from elastic.train.origin import is_defined_by_script

Attributes = dict[str, dict[str, Any]]
"""By the path of an object, such as a submodule, and the name of the attribute."""

_PLAIN = (bool, int, float, str, type(None))
# torch's own, such as whether hooks are registered; and "training", which is state.
_OF_TORCH = nn.Module().__dict__.keys() - {"training"}
_MISSING = object()
_WRAPPER = "."  # no submodule's path
_OBJECTS, _ELEMENTS, _DEPTH = 200, 100, 5  # of data
_LEAVES = (*_PLAIN, type, ModuleType, torch.Tensor)


class PlainAttributes:
    """The attributes of an object's parts, some of which training changes."""

    def __init__(self, owner: object, parts: Mapping[str, _Part]) -> None:
        self.owner = owner
        self._parts = parts

    def take(self) -> Attributes:
        """Those that training has changed, with their values."""
        taken = {path: part.take() for path, part in self._parts.items()}
        return {path: values for path, values in taken.items() if values}

    def dicts(self) -> Iterator[dict[str, Any]]:
        """The dicts that hold the attributes."""
        return (part.values for part in self._parts.values())

    def accept(self) -> None:
        """Let the values of all others be those that the script has set before its first loop."""
        for part in self._parts.values():
            part.accept()

    def restore(self, taken: Mapping[str, Mapping[str, Any]]) -> None:
        """Set these, and those that training has changed besides to what they were before."""
        for path, part in self._parts.items():
            part.restore(taken.get(path, {}))


def attributes_of_module(module: nn.Module, wrapper: nn.Module | None) -> PlainAttributes:
    """Of a module and its submodules, and whether its ``wrapper`` is in training mode."""
    parts = {path: _Part(part) for path, part in module.named_modules()}
    if wrapper is not None:  # its other attributes are those of DDP
        parts[_WRAPPER] = _Part(wrapper, only="training")
    return PlainAttributes(module, parts)


def attributes_of_data(dataset: object, collate: object) -> PlainAttributes:
    """Of the objects of :func:`objects_of_data` that are the script's."""
    objects = {p: o for p, o in objects_of_data(dataset, collate).items() if has_state(o)}
    return PlainAttributes(dataset, {path: _Part(one) for path, one in objects.items()})


def has_state(one: object) -> bool:
    """Whether the attributes of an object in a dataset are state: of modules, such as transforms,
    and of what the script defines. Others may be counts of references, or numbers of files."""
    owner = one if isinstance(one, FunctionType) else type(one)
    return isinstance(one, nn.Module) or is_defined_by_script(owner)


def objects_of_data(dataset: object, collate: object) -> dict[str, object]:
    """A dataset, the objects that it contains, such as transforms, and those of a ``collate_fn``:
    by their paths, those with attributes."""
    objects: dict[str, object] = {}
    seen = set[int]()
    left = deque([("dataset", dataset, 0), ("collate_fn", collate, 0)])
    while left and len(objects) < _OBJECTS:
        path, one, depth = left.popleft()
        if isinstance(one, _LEAVES) or id(one) in seen or depth > _DEPTH:
            continue
        seen.add(id(one))
        if type(getattr(one, "__dict__", None)) is dict and not isinstance(one, MethodType):
            objects[path] = one
        left.extend((f"{path}{name}", inner, depth + 1) for name, inner in _inside(one))
    return objects


def _inside(one: Any) -> Iterable[tuple[str, object]]:
    if isinstance(one, (list, tuple, dict)):  # longer ones hold samples
        entries = list(one.items() if isinstance(one, dict) else enumerate(one))
        return [(f"[{key!r}]", inner) for key, inner in entries] if len(one) <= _ELEMENTS else ()
    if isinstance(one, MethodType):
        return [(".__self__", one.__self__)]
    if isinstance(one, functools.partial):
        return [(".func", one.func)]
    values = getattr(one, "__dict__", None)
    return [(f".{key}", inner) for key, inner in list(values.items())] if values else ()


class _Part:
    """One object. A model may have a thousand of them: to compare its attributes takes half a
    microsecond."""

    def __init__(self, one: object, *, only: str = "") -> None:
        self.values = one.__dict__
        self._only = only
        self._before: dict[str, Any] = {}  # of those that training has changed
        self._read()

    def _read(self) -> None:
        names = (self._only,) if self._only else tuple(self.values)
        self._known = {
            name: value
            for name in names
            if type(value := self.values[name]) in _PLAIN and name not in _OF_TORCH
        }
        self._size = len(self.values)
        self._get = operator.itemgetter(*self._known) if self._known else len
        self._expected = self._get(self._known)

    def _is_unchanged(self) -> bool:
        if len(self.values) != self._size:
            return False
        try:
            return not self._known or bool(self._get(self.values) == self._expected)
        except Exception:  # noqa: BLE001  deleted, or an array that is compared by elements
            return False

    def take(self) -> dict[str, Any]:
        self._note()
        return {name: self.values[name] for name in self._before} if self._before else {}

    def _note(self) -> None:
        """Note which values have changed."""
        if self._is_unchanged():
            return
        known = self._known
        self._read()
        for name, value in self._known.items():
            before = known.get(name, _MISSING)
            if type(before) is not type(value) or before != value:
                self._before.setdefault(name, before)
        for name in self._before.keys() - self._known.keys():  # deleted, or a tensor now
            del self._before[name]

    def accept(self) -> None:
        if not self._is_unchanged():
            self._read()

    def restore(self, taken: Mapping[str, Any]) -> None:
        known = self._known
        self._note()
        for name in (self._before.keys() | known.keys()) - taken.keys():
            value = self._before.pop(name, known.get(name, _MISSING))
            if value is _MISSING:
                del self.values[name]
            elif self.values.get(name, _MISSING) is not value:
                self.values[name] = value
        for name, value in taken.items():
            self._before.setdefault(name, self.values.get(name, _MISSING))
            self.values[name] = value
        self._read()
