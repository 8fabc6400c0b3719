"""Finds the objects that the training function can reach: by closures, globals and attributes."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

Named = tuple[str, object]

_DEPTH = 6  # objects inside each other
_OBJECTS = 20_000  # visited per search: a few milliseconds
_ENTRIES = 1_000  # longer lists hold data
_LEAVES = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    ModuleType,
    BuiltinFunctionType,
    torch.Tensor,
    torch.optim.Optimizer,
)
# Instances of their classes hold no state of the script.
_LIBRARIES = frozenset({"torch", "torchvision", "numpy", "elastic", "checkpoints", "logging"})


def reachable(roots: Iterable[Named], *, without: frozenset[int] = frozenset()) -> Iterator[Named]:
    """Objects by breadth-first search, each once, with an expression for it.

    ``without``: ids of objects that are neither yielded nor entered.
    """
    seen = set(without)
    left = deque((name, one, 0) for name, one in roots)
    visited = 0
    while left and visited < _OBJECTS:
        name, one, depth = left.popleft()
        if isinstance(one, _LEAVES) or id(one) in seen:
            continue
        seen.add(id(one))
        visited += 1
        yield name, one
        if depth < _DEPTH:
            left.extend((n, inner, depth + 1) for n, inner in _inside(name, one))


def _inside(name: str, one: Any) -> Iterable[Named]:
    if isinstance(one, dict):  # other mappings may read files: shelve, h5py
        return _of_dict(name, one) if len(one) <= _ENTRIES else ()
    if isinstance(one, (list, tuple, deque)):
        return [(f"{name}[{i}]", o) for i, o in enumerate(one)] if len(one) <= _ENTRIES else ()
    if isinstance(one, FunctionType):
        return _closure(one)
    if isinstance(one, MethodType):
        return [("self", one.__self__), *_closure(one.__func__)]
    if isinstance(one, functools.partial):
        return [(name, part) for part in (one.func, *one.args, *one.keywords.values())]
    is_module = isinstance(one, nn.Module)
    if type(one).__module__.partition(".")[0] in _LIBRARIES and not is_module:
        return ()
    attributes = getattr(one, "__dict__", {})
    found = [(f"{name}.{key}", value) for key, value in list(attributes.items())]
    if is_module:
        found += [(f"{name}.{key}", child) for key, child in one.named_children()]
    return found


def _of_dict(name: str, entries: dict[Any, Any]) -> list[Named]:
    """A dict named "" holds variables."""
    return [
        (f"{name}[{key!r}]" if name else str(key), value)
        for key, value in list(entries.items())
        if isinstance(key, (str, int))
    ]


def _closure(function: Any) -> list[Named]:
    found: list[Named] = []
    for name, cell in zip(
        function.__code__.co_freevars, getattr(function, "__closure__", None) or (), strict=False
    ):
        try:
            found.append((name, cell.cell_contents))
        except ValueError:
            continue  # not assigned yet
    return found
