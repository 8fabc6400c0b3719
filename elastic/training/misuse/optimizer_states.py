"""Refuses optimizer state that a checkpoint, or a joining node, would change without an error.

- Plain tensors that differ between the shards of a parameter: 8-bit codes of this rank's shard, a
  preconditioner of it. State in DTensors is saved by shards, a plain tensor once, so every rank
  would resume with the values of one. Values computed from whole tensors, as in Muon and SOAP with
  ``full_tensor()``, are the same on all ranks, up to rounding: ranks compare a digest, and if it
  differs, a few numbers of each tensor. Only ranks of the same pipeline stage are compared.
- Tensor subclasses that consist of several tensors, such as torchao's ``OptimState8bit``: their
  values are saved, but torch's optimizers restore those as a plain tensor, no longer quantised.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from checkpoints.tensors.dtensors import is_dtensor, local_of
from elastic.errors import TrainingError
from elastic.process_group import all_gather_json
from elastic.training.state.change_watch import contents
from elastic.training.state.job_state import JobState
from elastic.training.state.untracked import saved_optimizers
from elastic.world.world import World

_MOST_ENTRIES = 64  # compared in detail
_SAMPLE = 8  # numbers of each tensor
_ROUNDING = 1e-3  # relative to the largest number of the sample

Sample = tuple[list[int], list[float]]
"""The shape of a tensor, and some of its numbers."""


class _Entry(NamedTuple):
    """A value in an optimizer's state that is no DTensor."""

    place: str  # the index of its parameter, and its key
    parameter: torch.Tensor
    key: str
    value: torch.Tensor | float


def _optimizers(job: JobState) -> dict[str, torch.optim.Optimizer]:
    """The optimizers whose state is saved, by the names of the tracked objects."""
    return {
        name: optimizer
        for name, tracked in job.all_tracked.items()
        for optimizer in saved_optimizers(tracked)
    }


def refuse_subclasses(job: JobState, world: World, step: int) -> None:
    """Raise TrainingError if an optimizer's state has a tensor subclass of several tensors."""
    for name, optimizer in _optimizers(job).items():
        for state in optimizer.state.values():
            for key, value in state.items() if isinstance(state, Mapping) else ():
                inner = local_of(value) if is_dtensor(value) else value
                if isinstance(inner, torch.Tensor) and hasattr(inner, "__tensor_flatten__"):
                    kind = type(inner).__name__
                    raise TrainingError(
                        f"after step {step}, {name} ({type(optimizer).__name__}) keeps "
                        f"state[{key!r}] as a {kind}, a tensor subclass: a checkpoint and joining "
                        "nodes would have its values only, and continue with a plain tensor",
                        hint="keep the tensors that it consists of in the optimizer's state, and "
                        f"create it where it is used: {kind}(state['codes'], state['scale'])",
                    )


def refuse_states_of_shards(job: JobState, world: World, step: int) -> None:
    """Raise TrainingError on all ranks if an optimizer over sharded parameters keeps plain values
    that differ between ranks of the same pipeline stage. A collective of the world, after step
    number ``step``."""
    optimizers = _optimizers(job)
    own: dict[str, Any] = {name: _digest(optimizer) for name, optimizer in optimizers.items()}
    gathered = all_gather_json(own)
    stages = [_stage_of(rank, world) for rank in range(world.size)]
    first = {stage: stages.index(stage) for stage in stages}
    if all(found == gathered[first[stages[rank]]] for rank, found in enumerate(gathered)):
        return
    entries = {name: _first_entries(optimizer) for name, optimizer in optimizers.items()}
    samples = {
        name: {place: _sample(entry.value) for place, entry in found.items()}
        for name, found in entries.items()
    }
    all_samples = all_gather_json(samples)
    for rank, found in enumerate(all_samples):
        for name, place in _differing(found, all_samples[first[stages[rank]]]):
            raise _refusal(
                job.all_modules, name, optimizers[name], entries[name].get(place), (step, rank)
            )


def _stage_of(rank: int, world: World) -> int:
    stage = world.mesh.stage_of(rank % world.mesh.size)
    return stage.index if stage is not None else 0


def _entries(optimizer: torch.optim.Optimizer) -> Iterator[_Entry]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for index, parameter in enumerate(parameters):
        if not _is_sharded(parameter):
            continue
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, int | float) or (
                isinstance(value, torch.Tensor) and not is_dtensor(value)
            ):
                yield _Entry(f"{index}/{key}", parameter, str(key), value)


def _is_sharded(parameter: Any) -> bool:
    return is_dtensor(parameter) and any(
        not placement.is_replicate() and parameter.device_mesh.size(dim) > 1
        for dim, placement in enumerate(parameter.placements)
    )


def _first_entries(optimizer: torch.optim.Optimizer) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for entry in _entries(optimizer):
        if len(entries) == _MOST_ENTRIES:
            break
        entries[entry.place] = entry
    return entries


def _digest(optimizer: torch.optim.Optimizer) -> str:
    found = list(_entries(optimizer))
    tensors = [entry.value for entry in found if isinstance(entry.value, torch.Tensor)]
    described = [
        (e.place, list(e.value.shape) if isinstance(e.value, torch.Tensor) else e.value)
        for e in found
    ]
    text = repr((described, contents(tensors)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _sample(value: torch.Tensor | float) -> Sample:
    if not isinstance(value, torch.Tensor):
        return [], [float(value)]
    flat = value.detach().reshape(-1)
    chosen = flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE]
    numbers = torch.view_as_real(chosen).reshape(-1) if chosen.is_complex() else chosen
    return list(value.shape), numbers.double().tolist()


def _differing(
    own: Mapping[str, Mapping[str, Sample]], expected: Mapping[str, Mapping[str, Sample]]
) -> Iterator[tuple[str, str]]:
    for name, found in own.items():
        reference = expected.get(name, {})
        for place in dict.fromkeys((*found, *reference)):
            if not _is_close(found.get(place), reference.get(place)):
                yield name, place


def _is_close(own: Sample | None, expected: Sample | None) -> bool:
    if own is None or expected is None or own[0] != expected[0]:
        return False
    largest = max(map(abs, (*own[1], *expected[1])), default=0.0)
    return all(
        a == b or abs(a - b) <= _ROUNDING * largest
        for a, b in zip(own[1], expected[1], strict=True)
    )


def _refusal(
    modules: Mapping[str, nn.Module],
    name: str,
    optimizer: torch.optim.Optimizer,
    entry: _Entry | None,
    place: tuple[int, int],
) -> TrainingError:
    step, rank = place
    kind = type(optimizer).__name__
    what = "plain values" if entry is None else _described(entry, modules)
    return TrainingError(
        f"after step {step}, {name} ({kind}) keeps {what} that differ between ranks (on rank "
        f"{rank}, among others): a checkpoint has plain tensors once, so all ranks would resume "
        "with those of one",
        hint="keep state of a sharded parameter p as DTensors, which are saved by shards: "
        'state["exp_avg"] = torch.zeros_like(p), or '
        'state["codes"] = DTensor.from_local(codes, p.device_mesh, p.placements, run_check=False, '
        "shape=p.shape, stride=p.stride()); or compute it from whole tensors, the same on all "
        "ranks: p.grad.full_tensor(). Replicas without checkpoints= may keep it",
    )


def _described(entry: _Entry, modules: Mapping[str, nn.Module]) -> str:
    names = {id(p): path for module in modules.values() for path, p in module.named_parameters()}
    kind = "plain tensors" if isinstance(entry.value, torch.Tensor) else "numbers"
    of = names.get(id(entry.parameter), f"parameter {entry.place.partition('/')[0]}")
    return f"{kind} state[{entry.key!r}] for the shards of {of!r}"
