"""Values of a state: their types, and writing new contents into existing objects."""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

import checkpoints.values
from checkpoints.errors import LoadError
from checkpoints.tensors import is_dtensor
from checkpoints.tree import Types
from checkpoints.values import PLAIN, is_array, items_of, like
from elastic.errors import TrainingError
from elastic.train.sharding import local_value

plain_form = functools.partial(checkpoints.values.plain_form, typed_tensors=True)
"""The form of a state in checkpoints and messages to other ranks; its types are a part of it."""


def typed_form(plain: Any, types: Types) -> Any:
    """The state whose :func:`plain_form` this is. New containers; the same tensors.

    Raises TrainingError if a type does not exist in this process.
    """
    try:
        return checkpoints.values.typed_form(plain, types)
    except LoadError as error:
        raise TrainingError(error.message, hint=f"{error.hint} (before run.retry)") from error


# ----------------------------------------------------------------------------
# Writes arriving state into live objects, in place.
#
# Scripts refer to parts of their state: ``head = optimizer.param_groups[1]``, a list in
# ``run.state``, the history of a tracked object. So wherever state arrives (at the start, from a
# checkpoint or another rank, in a rollback), containers and tensors stay the same objects and get
# new contents.
#
# A live object is replaced only where writing to it would change something else: two parts of the
# live state share an object or memory, and have different values in the arriving state.


def write_into(live: Any, saved: Any) -> Any:
    """Give ``live`` the value of ``saved``. Returns ``live``, or where its type or the shape of a
    tensor differs, an object that replaces it.

    Parts of ``saved`` may become parts of ``live``: pass a copy to keep it.
    """
    return Writing().write(live, saved)


class Writing:
    """One arriving state, whose parts are written one after the other.

    ``occupied``: tensors that have their new value already, such as the weights. No other part of
    the state may change them.
    """

    def __init__(self, occupied: Iterable[torch.Tensor] = ()) -> None:
        self._memory = _Memory()
        # By id, with the objects themselves, so that no id is used again.
        self._written: dict[int, Any] = {}  # live containers
        # Arriving objects of the current part, and what they became: one that arrives in two
        # places stays one object.
        self._results: dict[int, tuple[Any, Any]] = {}
        for tensor in occupied:
            self._memory.add(tensor)

    def write(self, live: Any, saved: Any) -> Any:
        """As :func:`write_into`."""
        self._results.clear()
        return self._result(_keep(live, {}), saved)

    @contextmanager
    def keeping(self, *stateful: Any) -> Iterator[None]:
        """Within the block these objects load a state, and may replace what they refer to. At its
        end, the previous containers and tensors are put back, with the loaded values.
        """
        kept = _keep(stateful, {})
        yield
        self._results.clear()
        self._result(kept, stateful)

    def _result(self, kept: _Kept | None, new: Any) -> Any:
        if type(new) in PLAIN:
            return new
        if id(new) not in self._results:
            self._results[id(new)] = (new, new)  # an object may contain itself
            self._results[id(new)] = (new, self._write(kept, new))
        return self._results[id(new)][1]

    def _write(self, kept: _Kept | None, new: Any) -> Any:
        live = kept.live if kept is not None and type(kept.live) is type(new) else None
        parts = kept.parts if kept is not None else {}
        if isinstance(new, torch.Tensor):
            return self._write_tensor(kept.live if kept is not None else None, new)
        if (items := items_of(new)) is not None:
            written = {key: self._result(parts.get(key), item) for key, item in items}
            return self._write_container(live, new, written)
        if isinstance(new, set) and live is not None and self._may_write(live, new):
            if live is not new:
                live.clear()
                live.update(new)
            return live
        if is_array(new) and live is not None and self._may_write(live, new):
            if live is not new:
                live[...] = new
            return live
        if live is new and _is_stateful(new):
            for name, value in list(_attributes(new)):
                result = self._result(parts.get(name), value)
                if result is not value:
                    vars(new)[name] = result
        return new

    def _write_container(self, live: Any, new: Any, written: dict[Any, Any]) -> Any:
        values = list(written.values())
        if isinstance(new, tuple):
            for candidate in (live, new):
                if candidate is not None and _are_same(candidate, values):
                    return candidate
            return like(new, values)
        target = live if live is not None and self._may_write(live, new) else new
        if isinstance(target, dict):
            _fill(target, written)
        elif not _are_same(target, values):
            target.clear()
            target.extend(values)
        return target

    def _may_write(self, live: Any, new: Any) -> bool:
        """Whether ``live`` may get the value of ``new``: it is not a part of the state elsewhere,
        or has the same value there."""
        if live is new:
            return True
        if isinstance(live, deque) and live.maxlen != new.maxlen:
            return False
        if is_array(live) and not _fits_array(live, new):
            return False
        if id(live) in self._written and not _are_equal(live, new):
            return False
        self._written[id(live)] = live
        return True

    def _write_tensor(self, live: Any, new: torch.Tensor) -> torch.Tensor:
        if live is new or not isinstance(live, torch.Tensor):
            return new
        if not is_dtensor(new):
            new = new.to(live.device)
        if not _can_hold(live, new):
            return new
        if self._memory.overlaps(live):
            return live if _are_equal(live, new) else new
        with torch.no_grad():
            live.detach().copy_(new)
        self._memory.add(live)
        return live


@dataclass(slots=True)
class _Kept:
    """A live object, and its parts by key, position or attribute, before a load replaces them."""

    live: Any
    parts: dict[Any, _Kept] = field(default_factory=dict)


def _keep(live: Any, known: dict[int, _Kept]) -> _Kept | None:
    if type(live) in PLAIN:
        return None
    if (kept := known.get(id(live))) is not None:
        return kept
    items = _attributes(live) if _is_stateful(live) else items_of(live)
    if items is None and not isinstance(live, (torch.Tensor, set)) and not is_array(live):
        return None
    kept = known[id(live)] = _Kept(live)
    for key, item in items or ():
        if (part := _keep(item, known)) is not None:
            kept.parts[key] = part
    return kept


def _attributes(stateful: Any) -> Iterable[tuple[Any, Any]]:
    """The attributes that loading may replace. A scheduler's optimizer is none, and large."""
    is_scheduler = isinstance(stateful, LRScheduler)
    return (i for i in vars(stateful).items() if not (is_scheduler and i[0] == "optimizer"))


def _is_stateful(value: Any) -> bool:
    """Whether the attributes of an object with a state_dict are parts of a state. Modules load
    their tensors in place by themselves."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, nn.Module))
        and hasattr(type(value), "state_dict")
        and hasattr(type(value), "load_state_dict")
    )


def _fill(target: MutableMapping[Any, Any], items: dict[Any, Any]) -> None:
    """Give a dict these items, in this order, without methods that a subclass replaces: those of a
    Counter count."""
    base: Any = OrderedDict if isinstance(target, OrderedDict) else dict
    if list(target) != list(items):
        base.clear(target)
    for key, item in items.items():
        if key not in target or target[key] is not item:
            base.__setitem__(target, key, item)


def _are_same(container: Any, values: list[Any]) -> bool:
    return len(container) == len(values) and all(
        one is other for one, other in zip(container, values, strict=True)
    )


def _fits_array(live: Any, new: Any) -> bool:
    return bool(live.flags.writeable and live.shape == new.shape and live.dtype == new.dtype)


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two values of a state are equal. NaN equals itself."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _can_hold(one, other) and _have_equal_bytes(local_value(one), local_value(other))
    if type(one) is not type(other):
        return False
    if is_array(one):
        return bool(_fits_array(one, other) and one.tobytes() == other.tobytes())
    if (items := items_of(one)) is None:
        return bool(one == other or (one != one and other != other))
    others = dict(items_of(other) or ())
    own = dict(items)
    return own.keys() == others.keys() and all(_are_equal(own[k], others[k]) for k in own)


def _have_equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(_bytes(one), _bytes(other.to(one.device)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _can_hold(live: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether the values of ``new`` can be written to ``live``, which then equals it."""
    if live.shape != new.shape or live.dtype != new.dtype or live.device != new.device:
        return False
    if live.layout != torch.strided or new.layout != torch.strided or live.is_inference():
        return False
    if is_dtensor(live) or is_dtensor(new):
        return is_dtensor(live) and is_dtensor(new) and _layout_of(live) == _layout_of(new)
    is_result = live.grad_fn is not None  # of a computation, which autograd may still need
    is_expanded = any(s == 0 and n > 1 for s, n in zip(live.stride(), live.shape, strict=True))
    return not is_result and not is_expanded


def _layout_of(tensor: Any) -> tuple[Any, Any]:
    return tensor.device_mesh, tensor.placements


class _Memory:
    """The memory of tensors."""

    def __init__(self) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = {}  # by storage
        self._tensors: list[torch.Tensor] = []  # which keep their addresses

    def add(self, tensor: torch.Tensor) -> None:
        if (place := _range_of(tensor)) is not None:
            storage, start, stop = place
            self._ranges.setdefault(storage, []).append((start, stop))
            self._tensors.append(tensor)

    def overlaps(self, tensor: torch.Tensor) -> bool:
        if (place := _range_of(tensor)) is None:
            return False
        storage, start, stop = place
        return any(a < stop and start < b for a, b in self._ranges.get(storage, ()))


def _range_of(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """The storage of a tensor, and the range of its addresses there; None without memory."""
    local = local_value(tensor)
    if local.layout != torch.strided or local.device.type == "meta" or not local.numel():
        return None
    start: int = local.data_ptr()
    last = sum((n - 1) * s for n, s in zip(local.shape, local.stride(), strict=True))
    return local.untyped_storage().data_ptr(), start, start + (last + 1) * local.element_size()
