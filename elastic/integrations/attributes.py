"""What a script keeps in attributes of its own trainers, callbacks and modules: counters, running
values, averaged weights. A framework knows nothing of them; here they are part of the job's state.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any, TypeGuard

import torch
from torch import nn

from elastic.train.copies import copied

_LIBRARIES = {
    "accelerate",
    "builtins",
    "elastic",
    "lightning",
    "lightning_fabric",
    "peft",
    "pytorch_lightning",
    "torch",
    "torchmetrics",
    "transformers",
    "trl",
}
_PLAIN = frozenset((bool, int, float, str, type(None)))


def is_of_library(cls: type) -> bool:
    """Whether a framework defines this class, not the script."""
    return cls.__module__.partition(".")[0] in _LIBRARIES


@functools.cache
def assigned_by_libraries(cls: type) -> frozenset[str]:
    """The attributes that the methods of a class assign, of those that a framework defines."""
    bases = (base for base in cls.__mro__ if is_of_library(base))
    members = (member for base in bases for member in vars(base).values())
    names = {name for member in members for name in _assigned(member)}
    return frozenset(names | set(vars(nn.Module())) if issubclass(cls, nn.Module) else names)


def _assigned(member: Any) -> Iterator[str]:
    parts = (member.fget, member.fset) if isinstance(member, property) else (member,)
    for part in parts:
        function = inspect.unwrap(getattr(part, "__func__", part)) if callable(part) else None
        if (code := getattr(function, "__code__", None)) is not None:
            yield from _assigned_in(code)


def _assigned_in(code: CodeType) -> Iterator[str]:
    owner: Any = None  # of the attribute: what was loaded last
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR" and owner in ("self", ("self",)):
            yield instruction.argval
        loaded = instruction.argval  # Python 3.13 loads two variables at once
        owner = loaded[-1:] if isinstance(loaded, tuple) else loaded
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _assigned_in(constant)


def own_attributes(owner: Any) -> dict[str, Any]:
    """The attributes of ``owner`` that no framework assigns."""
    cls: Any = type(owner)
    others = assigned_by_libraries(cls)
    return {name: value for name, value in vars(owner).items() if name not in others}


def own_modules(model: nn.Module) -> dict[str, nn.Module]:
    """``model``, and its modules of classes that the script defines, by name."""
    named = model.named_modules()
    return {name: each for name, each in named if each is model or not is_of_library(type(each))}


def of_job(owner: Any) -> dict[str, Any]:
    """The attributes of ``owner`` whose values are taken for the same on all ranks: numbers, texts,
    and, but for modules, dicts of those and of tensors, such as averaged weights. Lists and single
    tensors may be of a rank's samples."""
    cls: Any = type(owner)
    others, is_module = assigned_by_libraries(cls), isinstance(owner, nn.Module)
    return {  # in each step, of each module
        name: value
        for name, value in vars(owner).items()
        if (_is_plain(value) or (not is_module and _is_dict(value))) and name not in others
    }


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(key, str) and (_is_plain(each) or _is_tensor(each) or _is_dict(each))
        for key, each in value.items()
    )


def _is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not value.requires_grad


class ChangedAttributes:
    """The attributes of some objects, as in :func:`of_job`, that training changes.

    Others, such as a rank that was read once, belong to the process. An object with state: the
    names of what has changed travel with it, so a rank that joins knows them, too.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = dict(objects)
        self._first: dict[str, dict[str, Any]] | None = None
        self._names: dict[str, set[str]] = {}  # of all attributes at the beginning
        self._changed: set[tuple[str, str]] = set()

    def begin(self) -> None:
        """Training begins: what differs from now on has changed."""
        if self._first is None:
            self._first = self.values()
            self._names = {key: set(own_attributes(each)) for key, each in self._objects.items()}

    def values(self) -> dict[str, dict[str, Any]]:
        """Copies of all that are looked at, whether training has changed them or not."""
        return {key: copied(values) for key, values in self._read()}

    def set(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Give attributes these values. Dicts and their tensors stay the same objects."""
        for key, named in values.items():
            if key in self._objects:
                _put(vars(self._objects[key]), named)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        if self._first is None:
            return {}
        state: dict[str, dict[str, Any]] = {}
        for key, values in self._read():
            first = self._first[key]
            for name, value in values.items():
                if (key, name) not in self._changed and not _is_same(value, first.get(name, self)):
                    self._changed.add((key, name))
                if (key, name) in self._changed:
                    state.setdefault(key, {})[name] = value
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        loaded = {(key, name) for key, values in state.items() for name in values}
        if self._first is not None:
            for key, values in self._read():  # of those that had not changed yet
                new = {name for name in values if (key, name) not in loaded}
                for name in new - self._names[key]:
                    del vars(self._objects[key])[name]
                first = self._first[key]
                self.set({key: {name: first[name] for name in new & first.keys()}})
        self.set(state)
        self._changed = loaded

    def _read(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for key, owner in self._objects.items():
            yield key, of_job(owner)


def _put(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        own = into.get(name)
        if isinstance(own, dict) and isinstance(value, dict):
            for gone in own.keys() - value.keys():
                del own[gone]
            _put(own, value)
        elif _is_tensor(own) and _is_tensor(value) and own.shape == value.shape:
            own.copy_(value)
        else:
            into[name] = copied(value)


def _is_same(value: Any, other: Any) -> bool:
    """Dicts, which may hold tensors, are taken to change."""
    return type(value) is type(other) and not isinstance(value, dict) and value == other
