"""Restores optimizer state as it was, where ``load_state_dict`` changes it.

- torch casts every floating-point parameter's state to the parameter's dtype: moments in bfloat16
  would continue in float32, and 8-bit codes, too.
- A checkpoint restores DTensors of their parameter's shape by shards. Those of other shapes (one
  scale for each row, the factors of Adafactor) are read as a whole, and sharded by the placements
  that were saved with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from checkpoints.tensors.dtensors import is_dtensor

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
        tracked.load_state_dict(saved)


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
    optimizer.load_state_dict({**saved, "state": state})
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return  # it converts what it loads for itself
    for index, entries in state.items():
        if _is_of_parameter(index, entries, parameters):
            _restore_dtypes(optimizer.state[parameters[index]], entries)


def _restore_dtypes(own: dict[Any, Any], saved: Mapping[Any, Any]) -> None:
    for key, value in saved.items():
        loaded = own.get(key)
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
