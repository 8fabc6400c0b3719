"""What the training function changes outside of itself before its loop: ``args.lr *= world_size``.

``run.retry`` calls its function again after a death. A process that joins begins with the values
that the script has given before; a survivor would begin with those of the call before, and multiply
its rate twice. So numbers, lists, small arrays and tensors that a call has changed before its first
loop get the values back that they had before it, unless the loop has changed them since: what it
collects there, to report it, is kept. Generators of random numbers draw the same ones again before
the loop, where those of the job's state return to its boundary.

Flags and objects are left alone: a function may guard what it does once, ``if not self.is_ready``,
such as to change a model. So a number that a later call leaves as it was before has at its loop the
value that it had at the first call's.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from elastic.telemetry.log import get_logger
from elastic.train.generators import GENERATORS, GeneratorState
from elastic.train.origin import is_defined_by_script
from elastic.train.state import JobState

_NUMBERS = (int, float)  # no flags
_OBJECTS, _ENTRIES, _ELEMENTS = 5_000, 1_000, 1_024  # searched; of a list; of a tensor
_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
)
_LEAVES = (*_NUMBERS, str, bytes, type(None), torch.optim.Optimizer)


class Surroundings:
    """The values outside of the function of run.retry that its calls change before their loops."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._kept: list[_Kept] = []
        self._restored: list[_Kept] = []  # by the end of the call before
        self._of_state: list[_Kept] = []  # what it has changed that returns to the boundary
        self._is_before_loops = False

    def begin_call(self, roots: Iterable[object], *, is_again: bool) -> None:
        """The function is about to be called. It can reach ``roots``."""
        if is_again:
            self.end_call()
            for kept in self._of_state:
                kept.restore()
        else:
            self._restored = []
        self._kept, self._of_state, self._is_before_loops = [], [], True
        self._search(roots)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """What is changed inside, a call after this one will not change again: finished work."""
        kept = self._kept if self._is_before_loops else []
        for each in kept:
            each.mark()
        yield
        for each in kept:
            each.keep()

    def reach_loop(self) -> None:
        """The function has reached a loop. From its first one on, loops change what changes."""
        if not self._is_before_loops:
            return
        self._is_before_loops = False
        for each in self._restored:
            each.complete()
        self._restored = []
        self._kept = [kept for kept in self._kept if kept.note()]

    def end_call(self) -> None:
        """The function will be called again. Callbacks may set values of the new world first."""
        parts = [one for each in self._job.attributes().values() for one in each.dicts()]
        dicts = set(map(id, parts))
        for kept in self._kept:
            if kept.is_of(dicts):
                self._of_state.append(kept)
            else:
                kept.restore()
        if self._kept and not self._is_before_loops:
            self._restored = self._kept
        self._kept = []

    def _search(self, roots: Iterable[object]) -> None:
        job = self._job
        state = (*job.all_tracked.values(), *job.local.values(), *job.modules.values(), job.user)
        seen = set(map(id, (*state, *job.tensors_of_modules())))
        data = (loader.dataset for loader in job.loaders.values())
        left = deque[object]([*roots, *job.all_modules.values(), *data])
        number = 0
        while left and number < _OBJECTS:
            one = left.popleft()
            if id(one) in seen:
                continue
            try:
                if isinstance(one, _LEAVES):
                    continue
                kept, inside = [*_kept(one)], _inside(one)
            except Exception:  # noqa: BLE001  any object of the script may raise when it is read
                get_logger().info("what the function changes in an object is kept", exc_info=True)
                kept, inside = [], ()
            seen.add(id(one))
            number += 1
            self._kept += kept
            left.extend(inside)


class _Kept(Protocol):
    """The values of one object before a call."""

    def mark(self) -> None:
        """Remember the values of now."""

    def keep(self) -> None:
        """Those that have changed since are as before the call."""

    def note(self) -> bool:
        """Note the values at the loop. Returns whether some are others than before the call."""

    def restore(self) -> None:
        """Those that are as at the loop, or if it was not reached, as before the call."""

    def complete(self) -> None:
        """Those that are as restored, as they were at the loop."""

    def is_of(self, dicts: Collection[int]) -> bool:
        """Whether they are in one of these dicts of attributes, or a generator's."""


def _kept(one: Any) -> Iterator[_Kept]:
    if type(one) in (list, deque):
        if len(one) <= _ENTRIES:
            yield _KeptContents(lambda: list(one), functools.partial(_fill, one), _are_same)
    elif isinstance(one, torch.Tensor):
        is_plain = type(one) in (torch.Tensor, nn.Parameter) and one.layout is torch.strided
        is_small = is_plain and one.dtype in _DTYPES and one.numel() <= _ELEMENTS
        is_here = is_small and one.device.type == "cpu" and not one.is_inference()
        if is_here and one.untyped_storage().nbytes() > 0:
            yield _KeptContents(
                lambda: one.detach().clone(), functools.partial(_copy, one), torch.equal
            )
    elif isinstance(one, np.ndarray):
        if one.size <= _ELEMENTS and not one.dtype.hasobject:
            yield _KeptContents(one.copy, functools.partial(np.copyto, one), np.array_equal)
    elif isinstance(one, GENERATORS):
        state = GeneratorState(one)
        yield _KeptGenerator(state.state_dict, state.load_state_dict, _are_same_states)
    elif isinstance(one, dict):
        if len(one) <= _ENTRIES:
            yield _KeptNumbers(one, functools.partial(_write_entry, one))
    elif _has_attributes(one):
        is_class = isinstance(one, type)
        write = functools.partial(
            _write_attribute if is_class else _write_entry, one if is_class else vars(one)
        )
        yield _KeptNumbers(vars(one), write)
        if isinstance(one, FunctionType) and one.__closure__:
            cells = _Cells(one)
            yield _KeptNumbers(cells, cells.write)


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
        cells = [value for _, value in _Cells(one).items()] if one.__closure__ else []
        return (*values, *cells, one.__globals__)
    return values


class _Cells:
    """The variables of functions around a function."""

    def __init__(self, function: FunctionType) -> None:
        names, cells = function.__code__.co_freevars, function.__closure__ or ()
        self._cells = dict(zip(names, cells, strict=True))

    def items(self) -> list[tuple[str, object]]:
        both = [(name, self.get(name, _ABSENT)) for name in self._cells]
        return [(name, value) for name, value in both if value is not _ABSENT]

    def get(self, name: str, default: object = None) -> object:
        try:
            return self._cells[name].cell_contents
        except ValueError:
            return default  # not assigned yet

    def write(self, name: str, value: object) -> None:
        if value is _ABSENT:
            del self._cells[name].cell_contents
        else:
            self._cells[name].cell_contents = value


def _write_entry(values: dict[Any, Any], name: Any, value: object) -> None:
    if value is _ABSENT:
        values.pop(name, None)
    else:
        values[name] = value


def _write_attribute(owner: type, name: str, value: object) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


_ABSENT, _OTHER = object(), object()


class _KeptNumbers:
    """In a dict, an object's attributes or variables, and which of them exist."""

    def __init__(self, values: Any, write: Callable[[Any, Any], object]) -> None:
        self._values, self._write = values, write
        self._before = self._marked = self._numbers()
        self._noted: dict[Any, Any] | None = None

    def _numbers(self) -> dict[Any, Any]:
        return {n: _number(value) for n, value in list(self._values.items())}

    def mark(self) -> None:
        self._marked = self._numbers()

    def keep(self) -> None:
        self._before = {**self._before, **_changed(self._marked, self._numbers())}

    def note(self) -> bool:
        self._noted = _changed(self._before, self._numbers())
        return bool(self._noted)

    def restore(self) -> None:
        if self._noted is None:
            self.note()
        for name, noted in (self._noted or {}).items():
            if _are_equal(self._now(name), noted):
                self._write(name, self._before.get(name, _ABSENT))

    def complete(self) -> None:
        for name, noted in (self._noted or {}).items():
            if _are_equal(self._now(name), self._before.get(name, _ABSENT)):
                self._write(name, noted)

    def is_of(self, dicts: Collection[int]) -> bool:
        return id(self._values) in dicts

    def _now(self, name: Any) -> object:
        return _number(self._values.get(name, _ABSENT))


def _number(value: object) -> object:
    return value if value is _ABSENT or type(value) in _NUMBERS else _OTHER


def _are_equal(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


def _changed(before: dict[Any, Any], now: dict[Any, Any]) -> dict[Any, Any]:
    """Numbers that have changed, with those of now; _ABSENT if there is none any more."""
    pairs = {n: (before.get(n, _ABSENT), now.get(n, _ABSENT)) for n in (*before, *now)}
    return {
        name: value
        for name, (earlier, value) in pairs.items()
        if _OTHER not in (earlier, value) and not _are_equal(earlier, value)
    }


class _KeptContents:
    """What an object contains: ``read`` copies it, ``write`` sets it."""

    def __init__(
        self,
        read: Callable[[], Any],
        write: Callable[[Any], object],
        are_same: Callable[[Any, Any], bool],
    ) -> None:
        self._read, self._write, self._are_same = read, write, are_same
        self._before = self._marked = read()
        self._noted: Any = None

    def mark(self) -> None:
        self._marked = self._read()

    def keep(self) -> None:
        if not self._are_same(now := self._read(), self._marked):
            self._before = now

    def note(self) -> bool:
        self._noted = self._read()
        return not self._are_same(self._noted, self._before)

    def restore(self) -> None:
        now = self._read()
        is_as_noted = self._noted is None or self._are_same(now, self._noted)
        if is_as_noted and not self._are_same(now, self._before):
            self._write(self._before)

    def complete(self) -> None:
        if self._noted is not None and self._are_same(self._read(), self._before):
            self._write(self._noted)

    def is_of(self, dicts: Collection[int]) -> bool:
        return False


class _KeptGenerator(_KeptContents):
    """What the call before has drawn, the next one draws again, wherever the loop was."""

    def restore(self) -> None:
        self._write(self._before)

    def is_of(self, dicts: Collection[int]) -> bool:
        return True


def _fill(values: list[Any] | deque[Any], contents: list[Any]) -> None:
    values.clear()
    values.extend(contents)


def _are_same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _copy(tensor: torch.Tensor, contents: torch.Tensor) -> None:
    if tensor.shape != contents.shape:  # changed through .data
        tensor.data = contents.clone()
        return
    with torch.no_grad():
        tensor.copy_(contents)


def _are_same_states(one: dict[str, Any], other: dict[str, Any]) -> bool:
    state, wanted = one["state"], other["state"]
    return torch.equal(state, wanted) if isinstance(state, torch.Tensor) else bool(state == wanted)
