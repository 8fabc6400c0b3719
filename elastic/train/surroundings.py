"""What the training function changes outside of itself before its loop: ``args.lr *= world_size``.

``run.retry`` calls its function again after a death. A process that joins begins with the values
that the script has given before; a survivor would begin with those of the call before, and multiply
its rate twice. So numbers, lists and small tensors that a call has changed before its first loop
get the values back that they had before it, unless the loop has changed them since: what it
collects there, to report it, is kept. Generators of random numbers draw the same ones again before
the loop, where those of the job's state return to its boundary.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn

from elastic import torch_private
from elastic.telemetry.log import get_logger
from elastic.train.generators import GENERATORS, GeneratorState
from elastic.train.origin import is_defined_by_script
from elastic.train.state import JobState

_NUMBERS = (int, float)  # a bool is a flag, which may say that something exists
_OBJECTS, _ENTRIES, _ELEMENTS = 5_000, 1_000, 4_096  # searched; of a list; of a tensor
_LEAVES = (*_NUMBERS, bool, str, bytes, type(None), torch.optim.Optimizer)


class Surroundings:
    """The values outside of the function of run.retry that its calls change before their loops."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._kept: list[_Kept] = []
        self._is_before_loops = False

    def begin_call(self, roots: Iterable[object], *, is_again: bool) -> None:
        """The function is about to be called. It can reach ``roots``."""
        for kept in self._kept if is_again else ():
            kept.restore()
        self._kept, self._is_before_loops = [], True
        try:
            self._kept.extend(self._reachable(roots))
        except Exception:  # noqa: BLE001  any object of the script may raise when it is read
            get_logger().info("what the function changes is not searched for", exc_info=True)

    def reach_loop(self) -> None:
        """The function has reached a loop. From its first one on, loops change what changes."""
        if self._is_before_loops:
            self._is_before_loops = False
            self._kept = [kept for kept in self._kept if kept.note()]

    def _reachable(self, roots: Iterable[object]) -> Iterator[_Kept]:
        job = self._job
        state = (*job.all_tracked.values(), *job.local.values(), *job.modules.values(), job.user)
        seen = set(map(id, (*state, *job.tensors_of_modules())))
        data = (loader.dataset for loader in job.loaders.values())
        left = deque[object]([*roots, *job.all_modules.values(), *data])
        number = 0
        while left and number < _OBJECTS:
            one = left.popleft()
            if isinstance(one, _LEAVES) or id(one) in seen:
                continue
            seen.add(id(one))
            number += 1
            if kept := _kept(one):
                yield kept
            left.extend(_inside(one))


class _Kept(Protocol):
    """The values of one object before a call."""

    def note(self) -> bool:
        """Note the values at the loop. Returns whether some are others than before the call."""

    def restore(self) -> None:
        """Those that are as at the loop, or if it was not reached, as before the call."""


def _kept(one: object) -> _Kept | None:
    if isinstance(one, (list, deque)):
        return _KeptList(one) if len(one) <= _ENTRIES else None
    if isinstance(one, torch.Tensor):
        is_plain = type(one) in (torch.Tensor, nn.Parameter) and one.layout is torch.strided
        is_small = is_plain and one.numel() <= _ELEMENTS and not one.is_inference()
        has_values = is_small and one.untyped_storage().nbytes() > 0  # not those of a freed shard
        return _KeptTensor(one) if has_values else None
    if isinstance(one, GENERATORS):
        return _KeptGenerator(GeneratorState(one))
    if isinstance(one, dict):
        return _KeptNumbers(one, one) if len(one) <= _ENTRIES else None
    return _KeptNumbers(one, vars(one)) if _has_attributes(one) else None


def _has_attributes(one: Any) -> bool:
    """Whether an object's attributes are the script's."""
    if isinstance(one, (FunctionType, ModuleType, type)):
        return is_defined_by_script(one)
    if not hasattr(one, "__dict__"):
        return False
    if isinstance(one, (nn.Module, argparse.Namespace, SimpleNamespace)):
        return True
    # Not of a class of a framework, whose integration does the same for what it knows.
    kinds = type(one).__mro__
    packages = {k.__module__.partition(".")[0] for k in kinds if not is_defined_by_script(k)}
    return is_defined_by_script(type(one)) and packages <= {"torch", *sys.stdlib_module_names}


def _inside(one: Any) -> Iterable[object]:
    if isinstance(one, dict):
        return list(one.values()) if len(one) <= _ENTRIES else ()
    if isinstance(one, (list, tuple, set, deque)):
        return list(one) if len(one) <= _ENTRIES else ()
    if isinstance(one, MethodType):
        return (one.__self__, one.__func__)
    if isinstance(one, BuiltinMethodType):
        return (one.__self__,)
    if isinstance(one, functools.partial):
        return (one.func, *one.args, *one.keywords.values())
    if not _has_attributes(one):
        return ()
    values = list(vars(one).values())
    if isinstance(one, FunctionType):
        cells = [_content(cell) for cell in one.__closure__ or ()]
        return (*values, *cells, one.__globals__)
    return values


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # not assigned yet


class _KeptNumbers:
    """Of a dict, an object's attributes, or a module's variables."""

    def __init__(self, owner: object, values: Any) -> None:
        self._owner, self._values = owner, values
        self._before = self._numbers()
        self._noted: dict[Any, Any] | None = None

    def _numbers(self) -> dict[Any, Any]:
        return {n: v for n, v in list(self._values.items()) if type(v) in _NUMBERS}

    def note(self) -> bool:
        now = self._numbers()
        common = self._before.keys() & now.keys()
        self._noted = {name: now[name] for name in common if now[name] != self._before[name]}
        return bool(self._noted)

    def restore(self) -> None:
        if self._noted is None:
            self.note()
        for name, noted in (self._noted or {}).items():
            if type(now := self._values.get(name)) in _NUMBERS and now == noted:
                self._set(name, self._before[name])

    def _set(self, name: Any, value: Any) -> None:
        if isinstance(self._owner, type):
            setattr(self._owner, name, value)
        else:
            self._values[name] = value


class _KeptList:
    def __init__(self, values: list[Any] | deque[Any]) -> None:
        self._values = values
        self._before = list(values)
        self._noted: list[Any] | None = None

    def note(self) -> bool:
        self._noted = list(self._values)
        return not _are_same(self._noted, self._before)

    def restore(self) -> None:
        if self._noted is None or _are_same(list(self._values), self._noted):
            self._values.clear()
            self._values.extend(self._before)


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


class _KeptTensor:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._before = tensor.detach().clone()
        self._version = self._current()
        self._noted = -1

    def _current(self) -> int:
        return torch_private.count_of_changes((self._tensor,))

    def note(self) -> bool:
        self._noted = self._current()
        return self._noted != self._version

    def restore(self) -> None:
        is_changed = (now := self._current()) != self._version and self._noted in (-1, now)
        if is_changed and self._tensor.shape == self._before.shape:
            with torch.no_grad():
                self._tensor.copy_(self._before)


class _KeptGenerator:
    def __init__(self, generator: GeneratorState) -> None:
        self._generator = generator
        self._before = generator.state_dict()

    def note(self) -> bool:
        before, now = self._before["state"], self._generator.state_dict()["state"]
        is_tensor = isinstance(now, torch.Tensor)
        return not torch.equal(now, before) if is_tensor else bool(now != before)

    def restore(self) -> None:
        if self.note():
            self._generator.load_state_dict(self._before)
