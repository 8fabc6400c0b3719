"""Checks that all ranks have the same weights, on which recovery relies.

Ranks differ if gradients are not averaged (a forgotten ``run.wrap``), or if a script changes
weights or gradients with random numbers that differ between ranks. No error occurs, but the model
is worse.

Digests of the weights differ as soon as a bit of them does
(:mod:`elastic.train.weight_digest`). Then weights are compared by value.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from checkpoints.tensors import is_dtensor
from elastic.errors import TrainingError
from elastic.groups.collectives import all_gather_json, broadcast_tensors, peer_group
from elastic.groups.world import World
from elastic.telemetry.log import get_logger
from elastic.train.copies import tensors_in
from elastic.train.rollback import compares_content, contents
from elastic.train.sharding import HeldParts
from elastic.train.values import plain_form

_OF_BATCHES = ("running_mean", "running_var", "num_batches_tracked")
# Relative to the largest weight, because processors may round differently: at most, and for each
# update since the weights were the same, in units of the last place.
_ROUNDING, _ROUNDING_PER_STEP = 1e-4, 8
_MANY = 1 << 62  # updates
_NAMED = 4  # tensors in an error

Weights = Mapping[str, Sequence[torch.Tensor]]
Settings = Mapping[str, tuple[str, str]]


def is_compared_after(step: int) -> bool:
    """Whether ranks compare what no digest covers, after step number ``step`` of the job: settings
    and layouts of optimizers, other state, and ranks of a replica with the same parts.

    They do in the first steps and at powers of two: a few milliseconds, with decreasing frequency.
    """
    return compares_content(step)


def compare(
    weights: Weights,
    optimizers: Mapping[str, torch.optim.Optimizer],
    world: World,
    step: int,
    *,
    parts: Mapping[str, HeldParts] | None = None,
    changed_in: range | None = None,
) -> bool:
    """Raise TrainingError on all ranks if a rank differs from rank 0, or from the rank at its
    position in the first replica: in weights, in optimizer settings, or in the parameters that have
    optimizer state. Returns whether weights are the same bit by bit.

    ``weights``: by owner's name, with the same names and shapes on the compared ranks.
    ``optimizers``: the tracked optimizers, by name.
    ``parts``: of wrapped modules, by name.
    ``changed_in``: the steps since which weights may differ; before, they were the same bit by bit.
    """
    first = world.mesh.size  # number of ranks of the first replica
    own = {
        "weights": {name: list(contents(tensors)) for name, tensors in weights.items()},
        "settings": settings_of(optimizers),
        "states": {name: _digest(_layout(optimizer)) for name, optimizer in optimizers.items()},
    }
    gathered = all_gather_json(own)
    if world.mesh.stages > 1:
        _check_names(step, [sorted(theirs["settings"]) for theirs in gathered])
    if all(theirs == gathered[rank % first] for rank, theirs in enumerate(gathered)):
        return True
    for rank, theirs in enumerate(gathered):
        _check_settings(step, rank, theirs["settings"], rank % first, gathered[rank % first])
        _check_states(step, rank, theirs["states"], rank % first, gathered[rank % first])
    names = {name: own.names for name, own in (parts or {}).items()}
    steps = _MANY if changed_in is None else step + 1 - changed_in.start
    differing = all_gather_json(_differing(weights, names, steps, is_first=world.replica == 0))
    for other, theirs in enumerate(differing):
        if theirs:
            shown = ", ".join(theirs[:_NAMED]) + f" and {len(theirs) - _NAMED} more" * (
                len(theirs) > _NAMED
            )
            raise TrainingError(
                f"after step {step}, rank {other} has different weights from rank "
                f"{other % first} in {shown}{_since(changed_in)}: gradients or updates are not the "
                "same on all ranks",
                hint="call model = run.wrap(model) before you create the optimizer, and use it in "
                "the loop; wrap every other module with parameters, too "
                "(criterion = run.wrap(criterion)); random changes of weights or gradients need a "
                "generator with the same seed on all ranks: torch.Generator().manual_seed(step)",
            )
    return False


def _since(steps: range | None) -> str:
    if not steps:
        return ""
    first, last = steps[0], steps[-1]
    return f" since step {last}" if first == last else f" since one of steps {first} to {last}"


def settings_of(optimizers: Mapping[str, torch.optim.Optimizer]) -> Settings:
    """The learning rate of each optimizer, and a digest of all settings of its groups."""
    return {
        name: (_lr(optimizer), _digest([_plain(group) for group in optimizer.param_groups]))
        for name, optimizer in optimizers.items()
    }


def _lr(optimizer: torch.optim.Optimizer) -> str:
    return str(optimizer.param_groups[0].get("lr")) if optimizer.param_groups else ""


def _plain(group: Mapping[str, Any]) -> dict[str, str]:
    """The plain values of a group's settings: a scheduler may add other objects."""
    return {
        key: repr(value)
        for key, value in group.items()
        if isinstance(value, int | float | str | tuple | list) and key != "params"
    }


def _check_names(step: int, names: Sequence[Sequence[str]]) -> None:
    """Raise TrainingError if stages have optimizers of other names: after a fault in the middle of
    a step, the ranks of a replica compare by name which of them have stepped."""
    for rank, own in enumerate(names):
        if own != names[0]:
            raise TrainingError(
                f"after step {step}, rank {rank} has tracked the optimizers {', '.join(own)}, and "
                f"rank 0 {', '.join(names[0])}",
                hint="track the optimizers of all stages under the same names: "
                "run.track(optimizer=optimizer)",
            )


def _check_settings(step: int, rank: int, own: Any, other: int, reference: Any) -> None:
    differing = [name for name, value in own.items() if reference["settings"].get(name) != value]
    for name in differing:
        here, there = own[name][0], reference["settings"].get(name, ("",))[0]
        raise TrainingError(
            f"after step {step}, {name} has different settings on rank {rank} (lr={here}) and rank "
            f"{other} (lr={there}): the script computes them from a local counter, which restarts "
            "in a joining process, or from values that differ between ranks",
            hint="run.track(optimizer=optimizer, scheduler=scheduler); keep counters in run.state; "
            "pass ReduceLROnPlateau the mean over all ranks: run.mean(len(batch), "
            "loss=loss)['loss']",
        )


def _layout(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """For each parameter, the names of its state values, and the shapes of tensors."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        {
            str(key): list(value.shape) if isinstance(value, torch.Tensor) else ""
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        for parameter in parameters
    ]


def _check_states(step: int, rank: int, own: Any, other: int, reference: Any) -> None:
    for name in (name for name, layout in own.items() if reference["states"].get(name) != layout):
        raise TrainingError(
            f"after step {step}, {name} has state for different parameters on rank {rank} and rank "
            f"{other}: it is divided among the ranks, so a rank's death would lose a part",
            hint="update every parameter on every rank: Muon without its loop over rank and "
            "world_size, the inner optimizer instead of ZeroRedundancyOptimizer; "
            "fully_shard(model) divides an optimizer's state so that it survives",
        )


class Differing(NamedTuple):
    """The names of what differs between ranks, and would be lost with one of them."""

    state: list[str]  # values in ``run.state``
    tracked: list[str]  # objects of run.track, by their tensors
    copies: list[str]  # untracked copies of the model


def differing_names(
    state: Mapping[str, Any], tracked: Mapping[str, Any], copies: Mapping[str, str]
) -> Differing:
    """The values in ``run.state``, the tracked objects, and the untracked copies of the model,
    given by their digests, that differ between ranks. Every rank must call it.

    Optimizers are compared with the weights. Statistics of BatchNorm are those of a rank's samples,
    as in plain DDP.
    """
    own = [
        {str(key): _digest(plain_form(value)) for key, value in state.items()},
        {name: _digest(contents(_tensors(one))) for name, one in tracked.items()},
        dict(copies),
    ]
    of_state, of_tracked, of_copies = zip(*all_gather_json(own), strict=True)
    common = set.intersection(*map(set, of_copies))
    shared = [{name: digests[name] for name in common} for digests in of_copies]
    return Differing(_unequal(of_state), _unequal(of_tracked), _unequal(shared))


def _unequal(gathered: Sequence[Mapping[str, str]]) -> list[str]:
    names = {name for digests in gathered for name in digests}
    return sorted(n for n in names if len({digests.get(n) for digests in gathered}) > 1)


def warn_of_copies(names: Sequence[str]) -> None:
    """Warn about untracked copies of the model that were made before ranks had the same weights."""
    name = names[0]
    get_logger().warning(
        "%s has other weights on each rank: it was made before the ranks had the same ones. If the "
        "training uses it, call run.track(%s=%s), or torch.manual_seed(0) before the model is "
        "created",
        name,
        name.rpartition(".")[2],
        name,
    )


def _tensors(tracked: Any) -> list[torch.Tensor]:
    if isinstance(tracked, torch.optim.Optimizer):
        return []
    state = tracked.state_dict()
    if isinstance(tracked, nn.Module):
        state = {n: v for n, v in state.items() if n.rpartition(".")[2] not in _OF_BATCHES}
    return [tensor for tensor in tensors_in(state) if not is_dtensor(tensor)]


def warn_of_differing(differing: Differing) -> None:
    """Warn about values that a recovery would lose."""
    if names := differing.tracked:
        get_logger().warning(
            "the tracked %s differs between ranks: a rank's death loses its values, and a joining "
            "node gets those of another rank; a checkpoint has only those of rank 0. Write the "
            "same values on all ranks: gather what each rank adds with dist.all_gather_object, or "
            "sum it with dist.all_reduce. An average of a sharded model's weights is a second "
            "sharded model, ema = run.wrap(ema), or returned by the function of run.build",
            ", ".join(map(repr, names)),
        )
    if names := differing.state:
        _warn_of_state(names)


def _warn_of_state(names: Sequence[str]) -> None:
    get_logger().warning(
        "run.state differs between ranks in %s: after a rank's death, all ranks continue with the "
        "values of the lowest surviving rank. Set the same value on all ranks. To send a value "
        "that only rank 0 has, call value = run.mean(run.is_main, x=value)['x'] on every rank",
        ", ".join(map(repr, names)),
    )


def _digest(value: Any) -> str:
    encoded = json.dumps(value, sort_keys=True, default=repr).encode()
    return hashlib.blake2b(encoded, digest_size=8).hexdigest()


def _differing(
    weights: Weights, names: Mapping[str, Sequence[str]], steps: int, *, is_first: bool
) -> list[str]:
    """The tensors that differ from the first rank's by more than rounding in so many updates."""
    differing = []
    for owner, tensors in weights.items():
        first = {str(i): t.detach().clone() for i, t in enumerate(tensors)}
        broadcast_tensors(first, group=peer_group())
        for index, tensor in enumerate(tensors):
            if not is_first and _differs(tensor, first[str(index)], steps):
                name = f", {names[owner][index]!r}" if owner in names else ""
                differing.append(f"{owner} (parameter {index}{name})")
    return differing


def _differs(own: torch.Tensor, reference: torch.Tensor, steps: int) -> bool:
    if not own.numel():
        return False
    difference = (_wide(own) - _wide(reference)).abs().max()
    limit = _rounding(own.dtype, steps) * _wide(reference).abs().max()
    return bool((difference > limit).item())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def _rounding(dtype: torch.dtype, steps: int) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    return min(_ROUNDING, _ROUNDING_PER_STEP * torch.finfo(dtype).eps * steps)
