"""Loads a checkpoint into newly built objects. Each rank reads its shards.

The layout of the saving ranks is irrelevant: shards are read by their position in the complete
tensor (:mod:`checkpoints.tensors.layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import checkpoints
from checkpoints.catalog.manifests import read_manifest
from checkpoints.format.manifest import Manifest
from checkpoints.format.state_tree import unflatten
from checkpoints.tensors.dtensors import is_dtensor
from checkpoints.tensors.dtypes import BY_NAME


def load_shards(
    storage: checkpoints.Storage,
    name: str,
    *,
    modules: Mapping[str, nn.Module],
    tracked: Mapping[str, Any],
    check: Callable[[Mapping[str, Any]], object],
) -> checkpoints.LoadResult:
    """Read and verify a checkpoint: the modules' tensors in place, everything else into memory.

    If optimizer state has the shape of its sharded parameter, this rank's shard is read. ``check``
    is called before anything changes, with a state whose tensors have no memory, and raises if the
    state does not fit.

    Raises checkpoints.LoadError.
    """
    manifest = read_manifest(storage, name)
    check(unflatten(manifest.tree, lambda path, tensor: _without_memory(manifest, tensor)))
    into: dict[str, Any] = {
        "model": {key: _tensors(module.state_dict()) for key, module in modules.items()},
        "tracked": {},
    }
    for key, item in tracked.items():
        if isinstance(item, torch.optim.Optimizer):
            into["tracked"][key] = {"state": _room_for_state(manifest, key, item)}
    return checkpoints.load(storage, name, into=into, strict=False)


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def _without_memory(manifest: Manifest, tensor: str) -> torch.Tensor:
    spec = manifest.tensors[tensor].spec
    return torch.empty(spec.shape, dtype=BY_NAME[spec.dtype].torch, device="meta")


@dataclass(frozen=True)
class _Saved:
    """The name of a tensor in the checkpoint."""

    name: str


def _room_for_state(
    manifest: Manifest, key: str, optimizer: torch.optim.Optimizer
) -> dict[int, dict[str, torch.Tensor]]:
    """Empty shards for an optimizer's state in the checkpoint, in its parameters' layout."""
    saved = unflatten(manifest.tree, lambda path, name: _Saved(name))["tracked"].get(key)
    state = saved.get("state") if isinstance(saved, Mapping) else None
    if not isinstance(state, Mapping):
        return {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    room: dict[int, dict[str, torch.Tensor]] = {}
    for index, parameter in enumerate(parameters):
        entries = state.get(index)
        if not is_dtensor(parameter) or not isinstance(entries, Mapping):
            continue
        room[index] = {
            entry: torch.zeros_like(parameter.detach(), dtype=BY_NAME[spec.dtype].torch)
            for entry, tensor in entries.items()
            if isinstance(tensor, _Saved)
            and (spec := manifest.tensors[tensor.name].spec).shape == tuple(parameter.shape)
        }
    return room
