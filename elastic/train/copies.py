"""Copies of tensors and states of optimizers."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from checkpoints.tensors import is_dtensor
from checkpoints.values import PLAIN, is_array, items_of, like
from elastic.torch_private import copy_each
from elastic.train.sharding import local_value

# ----------------------------------------------------------------------------
# Copies tensors and optimizers' states, into the same memory from step to step.

_NOTHING: Mapping[Any, torch.Tensor] = {}


def copied(value: Any) -> Any:
    """A deep copy of containers, tensors and arrays, of the same types; anything else is shared."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        copy = value.detach().clone()
        if type(copy) is not kind:  # a parameter, or a subclass of it
            copy = copy.as_subclass(kind)
        return copy.requires_grad_() if value.requires_grad and value.is_leaf else copy
    if kind is dict:
        return {key: copied(item) for key, item in value.items()}
    if kind is list:
        return [copied(item) for item in value]
    if isinstance(value, set):
        return like(value, value)
    if isinstance(value, bytearray):
        return kind(value)
    return value.copy() if is_array(value) else rebuilt(value, lambda _, item: copied(item))


_CHUNK = 256  # elements of a list: fewer are copied in less time than they are compared
_EXACT = 2  # the version of marshal's format in which equal bytes mean equal values and types


class RepeatedCopies:
    """Deep copies of one value, from step to step; parts of a copy may be parts of the next one.

    A log grows by an element, but is long. Nothing tells whether the script has changed an earlier
    one, so they are compared in each step. But comparing takes a fraction of the time of a copy: a
    list is copied in chunks, and a chunk only if its bytes differ from those at its last copy.
    """

    def __init__(self, copy_tensor: Callable[[torch.Tensor], Any] = copied) -> None:
        self._copy_tensor = copy_tensor
        self._chunks: dict[Any, tuple[bytes, list[Any]]] = {}  # by their place: bytes and copies
        self._earlier: dict[Any, tuple[bytes, list[Any]]] = {}

    def copy(self, value: Any) -> Any:
        """A copy of the current value. It must not be changed."""
        self._earlier, self._chunks = self._chunks, {}
        return self._copy(value, ())

    def _copy(self, value: Any, place: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind in PLAIN:
            return value
        if kind is dict:
            return {
                k: v if type(v) in PLAIN else self._copy(v, (*place, k)) for k, v in value.items()
            }
        if kind is list and len(value) < _CHUNK:
            return self._copy_each(value, place)
        if kind is list:
            starts = range(0, len(value), _CHUNK)
            parts = [self._copy_chunk(value[at : at + _CHUNK], (*place, at)) for at in starts]
            return [each for part in parts for each in part]
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value)
        if items_of(value) is not None:
            return rebuilt(value, lambda key, item: self._copy(item, (*place, key)))
        return copied(value)

    def _copy_each(self, elements: list[Any], place: tuple[Any, ...]) -> list[Any]:
        return [
            v if type(v) in PLAIN else self._copy(v, (*place, i)) for i, v in enumerate(elements)
        ]

    def _copy_chunk(self, elements: list[Any], place: tuple[Any, ...]) -> list[Any]:
        earlier = self._earlier.get(place)
        data = _bytes_of(elements) if len(elements) == _CHUNK else None
        if data is not None and earlier is not None and earlier[0] == data:
            self._chunks[place] = earlier
            return earlier[1]
        copies = self._copy_each(elements, place)
        if data is not None and is_plain(elements):
            self._chunks[place] = data, copies
        return copies


def _bytes_of(elements: list[Any]) -> bytes | None:
    """Bytes that differ if plain elements do, in value or type. Those of other ones differ from
    all of these, but not from each other: an array is written without its type."""
    try:
        return marshal.dumps(elements, _EXACT)
    except ValueError:  # a tensor
        return None


def rebuilt(value: Any, item: Callable[[Any, Any], Any]) -> Any:
    """A container of the same type, with ``item(key or position, item)`` for each of its items; any
    other value as it is."""
    if (items := items_of(value)) is None:
        return value
    is_dict = isinstance(value, dict)
    return like(value, [(k, item(k, v)) if is_dict else item(k, v) for k, v in items])


def is_plain(value: Any) -> bool:
    """Whether checkpoints and messages to other ranks hold it as it is, except for rare tensors and
    huge integers (:mod:`elastic.train.values` has all rules). Fast, for each step.
    """
    kind = type(value)
    if kind is dict:
        if not all(type(key) is str or type(key) is int for key in value):
            return False
        items: Collection[Any] = value.values()
    elif kind is list or kind is tuple:
        items = value
    else:
        return kind in PLAIN or kind is torch.Tensor
    return PLAIN.issuperset(map(type, items)) or all(map(is_plain, items))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors in containers, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = items_of(value)
    return [] if items is None else [t for _, item in items for t in tensors_in(item)]


def placed_like(value: Any, own: Any) -> Any:
    """``value`` with each tensor on the device of the tensor at the same place in ``own``; others
    stay where they are."""
    if isinstance(value, torch.Tensor):
        return value.to(own.device) if isinstance(own, torch.Tensor) else value
    owned = dict(items_of(own) or ())
    return rebuilt(value, lambda key, item: placed_like(item, owned.get(key)))


def placed_on(device: torch.device, value: Any) -> Any:
    """``value`` with all of its tensors on ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return rebuilt(value, lambda _, item: placed_on(device, item))


class TensorCopies:
    """Copies of named tensors."""

    def __init__(self) -> None:
        self._copies: dict[Any, torch.Tensor] = {}

    def clone(self, key: Any) -> torch.Tensor:
        """A new tensor with the copied value."""
        return self._copies[key].clone()

    def has(self, key: Any) -> bool:
        """Whether there is a copy."""
        return key in self._copies

    def fits(self, key: Any, own: Any) -> bool:
        """Whether ``own`` is a tensor that can hold the copied value."""
        return isinstance(own, torch.Tensor) and can_hold(self._copies.get(key), own)

    @property
    def size_bytes(self) -> int:
        """Total size of all copies."""
        return sum(t.numel() * t.element_size() for t in self._copies.values())

    def take(self, tensors: Mapping[Any, torch.Tensor]) -> None:
        """Copy the current values."""
        if self._copies.keys() != tensors.keys() or any(
            not can_hold(self._copies[key], tensor) for key, tensor in tensors.items()
        ):
            self._copies = {key: torch.empty_like(t.detach()) for key, t in tensors.items()}
        if tensors:
            with torch.no_grad():
                sources = [local_value(tensor.detach()) for tensor in tensors.values()]
                copy_each([local_value(self._copies[key]) for key in tensors], sources)

    def update(self, tensors: Mapping[Any, torch.Tensor], changed: Collection[Any]) -> None:
        """Copy the current values of the ``changed`` keys, and forget keys without a tensor."""
        for key in self._copies.keys() - tensors.keys():
            del self._copies[key]
        for key in changed:
            self._copies[key] = tensors[key].detach().clone()

    def restore(self, tensors: Mapping[Any, torch.Tensor]) -> None:
        """Restore the tensors in place. Tensors without a copy keep their value."""
        known = [key for key in tensors if key in self._copies]
        with torch.no_grad():
            for key in known:
                if tensors[key].shape != self._copies[key].shape:
                    tensors[key].resize_(self._copies[key].shape)
            if known:
                current = [local_value(tensors[key].detach()) for key in known]
                copy_each(current, [local_value(self._copies[key]) for key in known])


class WeightCopies:
    """Copies of parameters and of their optimizer state (momenta, step counts, …).

    Hyper-parameters are non-parameter state: see :mod:`elastic.train.rollback`.
    """

    def __init__(self) -> None:
        self._tensors = TensorCopies()
        self._entries: list[_Entry] = []
        self._values: dict[Any, Any] = {}  # entries other than tensors
        self._memory: list[tuple[torch.Tensor, torch.Tensor]] = []  # of tensors of modules
        self._addresses: dict[Any, int] = {}  # of all tensors, when they were copied
        self._replaced: set[Any] = set()  # tensors that could not be restored in place

    @property
    def size_bytes(self) -> int:
        """Total size of the copies."""
        return self._tensors.size_bytes

    def take(
        self,
        parameters: Sequence[torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        others: Mapping[Any, torch.Tensor] = _NOTHING,
        modules: Iterable[torch.Tensor] = (),
    ) -> None:
        """Copy the current values.

        ``others``: more tensors, by any key but a plain number; ``modules``: tensors of modules
        whose memory a script may exchange, as ``parameter.data = average`` does.
        """
        self._memory = [(t, t.data) for t in modules if not is_dtensor(t)]
        self._tensors.take(self._note(parameters, optimizers, others))

    def _note(
        self,
        parameters: Sequence[torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        others: Mapping[Any, torch.Tensor],
    ) -> Mapping[Any, torch.Tensor]:
        self._entries = _entries(optimizers)
        self._values = {e.place: copied(e.value) for e in self._entries if not e.is_tensor}
        tensors = keyed_tensors(parameters, optimizers, others)
        self._addresses = {key: _address(tensor) for key, tensor in tensors.items()}
        return tensors

    def update(
        self,
        parameters: Sequence[torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        others: Mapping[Any, torch.Tensor],
        changed: Collection[Any],
    ) -> None:
        """Copy the current values of the ``changed`` keys only, and forget tensors that no longer
        exist."""
        self._tensors.update(self._note(parameters, optimizers, others), changed)

    def restore(
        self,
        parameters: Sequence[torch.Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        others: Mapping[Any, torch.Tensor] = _NOTHING,
    ) -> None:
        """Restore everything in place: references to these tensors stay valid.

        A tensor that has come to share memory with another one cannot be restored in place; it is
        replaced.
        """
        for tensor, memory in self._memory:
            if tensor.data_ptr() != memory.data_ptr():
                tensor.data = memory
        known = {entry.place for entry in self._entries}
        for entry in _entries(optimizers):
            if entry.place not in known:
                entry.remove()  # created by the step that is undone
        tensors: dict[Any, torch.Tensor] = dict(enumerate(parameters))
        taken = {_address(tensor): key for key, tensor in tensors.items()}

        def is_usable(key: Any, own: Any) -> bool:
            if not self._tensors.fits(key, own):
                return False
            other = taken.setdefault(_address(own), key)
            return self._addresses[other] == self._addresses[key]

        self._replaced = {key for key, own in others.items() if not is_usable(key, own)}
        tensors |= {key: own for key, own in others.items() if key not in self._replaced}
        for entry in self._entries:
            if not entry.is_tensor:
                entry.value = copied(self._values[entry.place])
                continue
            current = entry.value
            if not is_usable(entry.place, current):
                current = entry.value = self._tensors.clone(entry.place)
            tensors[entry.place] = current
        self._tensors.restore(tensors)

    def tensor(self, key: Any, own: torch.Tensor | None) -> torch.Tensor | None:
        """``own``, restored, if it can hold the copied value; otherwise a new tensor with it."""
        if not self._tensors.has(key):
            return own
        if key not in self._replaced and self._tensors.fits(key, own):
            return own
        return self._tensors.clone(key)


def _address(tensor: torch.Tensor) -> int:
    """Where the tensor's memory begins; distinct for tensors without memory."""
    local = local_value(tensor.detach())
    return local.data_ptr() or -id(tensor)


class _Entry:
    """One value in an optimizer's state: ``optimizer.state[owner][key]``; owner: a parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer, owner: Any, key: Any) -> None:
        self._optimizer, self._owner, self._key = optimizer, owner, key
        self.place = (id(optimizer), id(owner), key)
        self.is_tensor = isinstance(self.value, torch.Tensor)

    @property
    def value(self) -> Any:
        state = self._optimizer.state.get(self._owner)
        return state.get(self._key) if isinstance(state, dict) else state

    @value.setter
    def value(self, value: Any) -> None:
        state = self._optimizer.state
        if self._key is None:
            state[self._owner] = value
        else:
            state.setdefault(self._owner, {})[self._key] = value

    def remove(self) -> None:
        state = self._optimizer.state
        if self._key is None:
            del state[self._owner]
            return
        del state[self._owner][self._key]
        if not state[self._owner]:
            del state[self._owner]


def keyed_tensors(
    parameters: Sequence[torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    others: Mapping[Any, torch.Tensor] = _NOTHING,
) -> dict[Any, torch.Tensor]:
    """Parameters by their position, ``others``, and optimizers' tensors by their place."""
    tensors: dict[Any, torch.Tensor] = dict(enumerate(parameters))
    tensors |= others
    return tensors | {e.place: e.value for e in _entries(optimizers) if e.is_tensor}


def _entries(optimizers: Sequence[torch.optim.Optimizer]) -> list[_Entry]:
    return [
        _Entry(optimizer, owner, key)
        for optimizer in optimizers
        for owner, state in list(optimizer.state.items())
        for key in (list(state) if isinstance(state, dict) else [None])
    ]


def can_hold(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Whether ``one`` can hold a copy of ``other``."""
    return (
        one is not None
        and one.shape == other.shape
        and one.dtype == other.dtype
        and one.device == other.device
    )


# ----------------------------------------------------------------------------
# Restores optimizer state as it was, where ``load_state_dict`` changes it.
#
# - torch casts every floating-point parameter's state to the parameter's dtype: moments in
#   bfloat16 would continue in float32, and 8-bit codes, too. It builds nested containers from a
#   generator, which fails for a namedtuple, and turns a str into the description of that
#   generator.
# - torch replaces the list and the dicts of the parameter groups, and all state: a reference that
#   a script keeps, or a compiled update, would see the earlier values.
# - A checkpoint restores DTensors of their parameter's shape by shards. Those of other shapes (one
#   scale for each row, the factors of Adafactor) are read as a whole, and sharded by the
#   placements that were saved with them.

Layouts = dict[str, dict[str, list[int | None]]]
"""For the index of a parameter and a key of its state, the dimension that each dimension of the
parameter's mesh shards; None: replicated."""


def layouts_of(tracked: Mapping[str, Any]) -> dict[str, Layouts]:
    """For each optimizer with such state, the layouts of DTensors with another shape than their
    parameter."""
    optimizers = {n: t for n, t in tracked.items() if isinstance(t, torch.optim.Optimizer)}
    return {n: layouts for n, o in optimizers.items() if (layouts := _layouts(o))}


def _layouts(optimizer: torch.optim.Optimizer) -> Layouts:
    layouts: Layouts = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            dims = _sharded_dims(parameter, value)
            if dims is not None:
                layouts.setdefault(str(index), {})[str(key)] = dims
    return layouts


def load_tracked(tracked: Any, saved: Mapping[str, Any], layouts: Layouts) -> None:
    """Load the result of ``state_dict`` into a tracked object. In that of an optimizer, DTensors
    with ``layouts`` (none in older checkpoints) may be whole."""
    if isinstance(tracked, torch.optim.Optimizer) and "state" in saved:
        _load_optimizer(tracked, saved, layouts)
    else:
        tracked.load_state_dict(_on_its_device(saved, tracked))


def _on_its_device(saved: Any, tracked: Any) -> Any:
    """Tensors arrive on the CPU, from a checkpoint or another rank; an object that keeps those it
    loads continues on the device that it was created on, as with torch.load."""
    if isinstance(tracked, (torch.optim.Optimizer, nn.Module)) or not tensors_in(saved):
        return saved
    return placed_like(saved, tracked.state_dict())


@dataclass(frozen=True)
class _Unconverted:
    """A value that torch must not convert. Not iterable."""

    value: Any


def _load_optimizer(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], layouts: Layouts
) -> None:
    parameters = _parameters(optimizer)
    state = {
        index: {
            key: _sharded(value, parameters[index], layouts.get(str(index), {}).get(str(key)))
            for key, value in entries.items()
        }
        if _is_of_parameter(index, entries, parameters)
        else entries
        for index, entries in saved["state"].items()
    }
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        optimizer.load_state_dict({**saved, "state": state})  # it converts what it loads itself
        return
    for_torch = {
        index: {key: _for_torch(value) for key, value in entries.items()}
        if _is_of_parameter(index, entries, parameters)
        else entries
        for index, entries in state.items()
    }
    optimizer.load_state_dict({**saved, "state": for_torch})
    for index, entries in state.items():
        if _is_of_parameter(index, entries, parameters):
            parameter = parameters[index]
            _restore_values(optimizer.state[parameter], entries, parameter.device)


def _for_torch(value: Any) -> Any:
    is_iterable = isinstance(value, Iterable) and not isinstance(value, torch.Tensor)
    return _Unconverted(value) if is_iterable else value


def _restore_values(own: dict[Any, Any], saved: Mapping[Any, Any], device: torch.device) -> None:
    for key, loaded in list(own.items()):
        if isinstance(loaded, _Unconverted):
            own[key] = placed_on(device, loaded.value)
            continue
        value = saved.get(key)
        if key == "step" or not isinstance(value, torch.Tensor):
            continue
        if isinstance(loaded, torch.Tensor) and loaded.dtype != value.dtype:
            own[key] = value.to(loaded.device)


def _is_of_parameter(index: Any, entries: Any, parameters: list[Any]) -> bool:
    return isinstance(index, int) and index < len(parameters) and isinstance(entries, Mapping)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _sharded_dims(parameter: Any, value: Any) -> list[int | None] | None:
    if not (isinstance(value, torch.Tensor) and is_dtensor(value) and is_dtensor(parameter)):
        return None
    state: Any = value
    if state.shape == parameter.shape or state.device_mesh != parameter.device_mesh:
        return None
    from torch.distributed.tensor import Shard

    dims: list[int | None] = []
    for placement in state.placements:
        if type(placement) is not Shard and not placement.is_replicate():
            return None
        dims.append(None if placement.is_replicate() else placement.dim)
    return dims


def _sharded(value: Any, parameter: Any, dims: list[int | None] | None) -> Any:
    if dims is None or is_dtensor(value) or not is_dtensor(parameter):
        return value
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    mesh = parameter.device_mesh
    # Each rank has the whole value: no communication.
    return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)
