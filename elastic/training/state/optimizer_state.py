"""Restores optimizer state as it was, where ``load_state_dict`` changes it.

- torch casts every floating-point parameter's state to the parameter's dtype: moments in bfloat16
  would continue in float32, and 8-bit codes, too. It builds nested containers from a generator,
  which fails for a namedtuple, and turns a str into the description of that generator.
- torch replaces the list and the dicts of the parameter groups, and all state: a reference that a
  script keeps, or a compiled update, would see the earlier values.
- A checkpoint restores DTensors of their parameter's shape by shards. Those of other shapes (one
  scale for each row, the factors of Adafactor) are read as a whole, and sharded by the placements
  that were saved with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from checkpoints.tensors.dtensors import is_dtensor
from elastic.training.state.copies import placed_like, placed_on, tensors_in

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
