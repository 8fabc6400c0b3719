"""Checks that all ranks have the same weights, which recovery relies on.

Ranks differ when gradients are not averaged (a forgotten ``run.wrap``), or when a script changes
weights or gradients with random numbers that differ per rank. No error occurs, but the model is
worse.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elastic.errors import TrainingError
from elastic.process_group import all_gather_json, broadcast_tensors, peer_group
from elastic.telemetry.log import get_logger
from elastic.training.state.change_watch import compares_content, contents
from elastic.world.world import World

_ROUNDING = 1e-4  # relative to the largest weight: other processors may round differently

Weights = Mapping[str, Sequence[torch.Tensor]]
Settings = Mapping[str, tuple[str, str]]


def is_compared_after(step: int) -> bool:
    """Whether ranks compare their weights after step number ``step`` of the job.

    In its first steps and at powers of two: a few milliseconds, with decreasing frequency.
    """
    return compares_content(step)


def compare(
    weights: Weights,
    optimizers: Mapping[str, torch.optim.Optimizer],
    world: World,
    step: int,
    *,
    alike: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Raise TrainingError on all ranks if one of them has different weights from rank 0, or from
    the rank at its position of the first replica, has stepped an optimizer with different settings,
    or has optimizer state of different parameters.

    ``weights``: by the name of their owner, the same names and shapes on each of these.
    ``optimizers``: the tracked ones, by name.
    ``alike``: for each of the weights, the first rank of the replica that has the same part.
    """
    if set(world.mesh.split_dims) - {*world.mesh.data_dims, "cp"}:  # else each has its own part
        _compare_within(weights, alike or {}, world, step)
    first = world.mesh.size  # number of ranks of the first replica
    mine = {
        "weights": {name: list(contents(tensors)) for name, tensors in weights.items()},
        "settings": settings_of(optimizers),
        "states": {name: _digest(_layout(optimizer)) for name, optimizer in optimizers.items()},
    }
    everyones = all_gather_json(mine)
    if all(theirs == everyones[rank % first] for rank, theirs in enumerate(everyones)):
        return
    for rank, theirs in enumerate(everyones):
        _check_settings(step, rank, theirs["settings"], rank % first, everyones[rank % first])
        _check_states(step, rank, theirs["states"], rank % first, everyones[rank % first])
    differing = all_gather_json(_differing(weights, is_first=world.replica == 0))
    for other, names in enumerate(differing):
        if names:
            raise TrainingError(
                f"after step {step}, rank {other}'s weights differ from rank {other % first}'s in "
                f"{', '.join(names)}: their gradients or updates are not "
                "the same on all ranks",
                hint="call model = run.wrap(model) before creating the optimizer, use it in "
                "the loop; wrap every other module with parameters, too "
                "(criterion = run.wrap(criterion)); random changes of weights or "
                "gradients need a generator with the same seed on all ranks: "
                "torch.Generator().manual_seed(step)",
            )


def _compare_within(
    weights: Weights, alike: Mapping[str, Sequence[int]], world: World, step: int
) -> None:
    """The same among the ranks of a replica that hold the same part of a parameter."""
    mine = {
        name: [_projections(t) for t in tensors]
        for name, tensors in weights.items()
        if name in alike
    }
    everyones = all_gather_json({"weights": mine, "alike": alike})
    for rank, theirs in enumerate(everyones):
        begins = rank - rank % world.mesh.size
        for name, found in theirs["weights"].items():
            firsts = [begins + position for position in theirs["alike"][name]]
            for index, (first, values) in enumerate(zip(firsts, found, strict=True)):
                if _are_others(values, everyones[first]["weights"][name][index]):
                    raise TrainingError(
                        f"after step {step} rank {rank}'s weights differ from rank {first}'s in "
                        f"{name} (parameter {index}), but both ranks hold the same part of it: "
                        "the gradients of these ranks are not reduced over a dimension of the "
                        f"mesh ({world.mesh}) along which they differ",
                        hint="ranks along tp see the same samples, and compute the same; what "
                        "splits a sample between them is a dimension cp, over which fully_shard "
                        "reduces (docs/how-to/sharded.md)",
                    )


def _projections(tensor: torch.Tensor) -> list[float]:
    """What rounding leaves nearly as it is, and other weights do not: the largest value, and sums
    under signs that differ."""
    if not tensor.numel():
        return []
    with torch.no_grad():
        flat = tensor.detach().reshape(-1).double()
        sums = [flat.sum(), flat[::2].sum(), flat[: flat.numel() // 2 + 1].sum()]
        size = flat.numel() ** 0.5
        return [float(flat.abs().max()), *(float(each) / size for each in sums)]


def _are_others(mine: Sequence[float], theirs: Sequence[float]) -> bool:
    limit = _ROUNDING * (theirs[0] if theirs else 0.0)
    return len(mine) != len(theirs) or any(
        abs(one - other) > limit for one, other in zip(mine, theirs, strict=True)
    )


def settings_of(optimizers: Mapping[str, torch.optim.Optimizer]) -> Settings:
    """The learning rate of each optimizer, and a digest of the other settings of its groups."""
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


def _check_settings(step: int, rank: int, mine: Any, other: int, theirs: Any) -> None:
    differing = [name for name, said in mine.items() if theirs["settings"].get(name) != said]
    for name in differing:
        here, there = mine[name][0], theirs["settings"].get(name, ("",))[0]
        raise TrainingError(
            f"after step {step}, {name} has other settings on rank {rank} (lr={here}) than on rank "
            f"{other} (lr={there}): the script computes them from a local counter, reset in a "
            "joining process, or from values that differ between ranks",
            hint="run.track(optimizer=optimizer, scheduler=scheduler); keep counters in run.state; "
            "give ReduceLROnPlateau the mean of all ranks: run.mean(len(batch), loss=loss)['loss']",
        )


def _layout(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """For each parameter, the names of its state, with the shapes of tensors."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [
        {
            str(key): list(value.shape) if isinstance(value, torch.Tensor) else ""
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        for parameter in parameters
    ]


def _check_states(step: int, rank: int, mine: Any, other: int, theirs: Any) -> None:
    for name in (name for name, layout in mine.items() if theirs["states"].get(name) != layout):
        raise TrainingError(
            f"after step {step}, {name} has the state of other parameters on rank {rank} than on "
            f"rank {other}: it is divided among the ranks, so the death of one would lose a part",
            hint="update every parameter on every rank: an optimizer like Muon without its loop "
            "over rank and world_size, the inner optimizer instead of ZeroRedundancyOptimizer; "
            "fully_shard(model) divides the state of an optimizer so that it survives",
        )


def differing_names(state: Mapping[str, Any]) -> list[str]:
    """The names in ``run.state`` whose values differ between ranks. Every rank must call it."""
    everyones = all_gather_json({key: _digest(value) for key, value in state.items()})
    names = {name for theirs in everyones for name in theirs}
    return sorted(n for n in names if len({theirs.get(n) for theirs in everyones}) > 1)


def warn_of_differing(names: Sequence[str]) -> None:
    """Warn about values that a recovery would lose."""
    get_logger().warning(
        "run.state differs between ranks in %s: after the death of a rank, all continue with the "
        "values of the lowest surviving rank. Set the same value on all ranks. A value that only "
        "one rank has can be sent with value = run.mean(run.is_main, x=value)['x'], which "
        "every rank must call",
        ", ".join(map(repr, names)),
    )


def _digest(value: Any) -> str:
    said = json.dumps(value, sort_keys=True, default=repr).encode()
    return hashlib.blake2b(said, digest_size=8).hexdigest()


def _differing(weights: Weights, *, is_first: bool) -> list[str]:
    """The names whose weights differ from the first rank's by more than rounding."""
    names = []
    for name, tensors in weights.items():
        theirs = {str(i): t.detach().clone() for i, t in enumerate(tensors)}
        broadcast_tensors(theirs, group=peer_group())
        if not is_first and any(_is_other(t, theirs[str(i)]) for i, t in enumerate(tensors)):
            names.append(name)
    return names


def _is_other(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if not mine.numel():
        return False
    difference = (mine.detach().double() - theirs.double()).abs().max()
    limit = _ROUNDING * theirs.double().abs().max()
    return bool((difference > limit).item())
