"""Whether all ranks still hold the same weights: recovery takes that for granted.

Ranks differ when gradients are not averaged (a forgotten ``run.wrap``), or when a script changes
weights or gradients by what each rank draws for itself. Nothing fails then, and the model is worse.
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

_ROUNDING = 1e-4  # of the largest weight: other processors may round otherwise

Weights = Mapping[str, Sequence[torch.Tensor]]
Settings = Mapping[str, tuple[str, str]]


def is_compared_after(step: int) -> bool:
    """Whether ranks compare their weights after step number ``step`` of the job.

    In its first steps and at powers of two: a few milliseconds, ever more rarely.
    """
    return compares_content(step)


def compare(weights: Weights, settings: Settings, world: World, step: int) -> None:
    """Raise TrainingError on all ranks if one of them has other weights than rank 0, or than the
    rank at its position of the first replica, or has stepped an optimizer with other settings.

    ``weights``: by the name of their owner, the same names and shapes on each of these.
    ``settings``: of each optimizer, from :func:`settings_of`.
    """
    first = world.mesh.size  # of the first replica's ranks there are so many
    mine = {name: list(contents(tensors)) for name, tensors in weights.items()}
    everyones = all_gather_json({"weights": mine, "settings": settings})
    if all(theirs == everyones[rank % first] for rank, theirs in enumerate(everyones)):
        return
    for rank, theirs in enumerate(everyones):
        _check_settings(step, rank, theirs["settings"], rank % first, everyones[rank % first])
    differing = all_gather_json(_differing(weights, is_first=world.replica == 0))
    for other, names in enumerate(differing):
        if names:
            raise TrainingError(
                f"after step {step} rank {other} has other weights than rank {other % first} in "
                f"{', '.join(names)}: they are updated with gradients, or by amounts, that are not "
                "the same on all ranks",
                hint="model = run.wrap(model) before the optimizer is made, and call that model in "
                "the loop, as well as every other module with parameters of its own "
                "(criterion = run.wrap(criterion)); what is drawn at random for weights or "
                "gradients needs a generator with the same seed on all ranks: "
                "torch.Generator().manual_seed(step)",
            )


def settings_of(optimizers: Mapping[str, torch.optim.Optimizer]) -> Settings:
    """The learning rate of each optimizer, and a digest of whatever else its groups are set to."""
    return {
        name: (_lr(optimizer), _digest([_plain(group) for group in optimizer.param_groups]))
        for name, optimizer in optimizers.items()
    }


def _lr(optimizer: torch.optim.Optimizer) -> str:
    return str(optimizer.param_groups[0].get("lr")) if optimizer.param_groups else ""


def _plain(group: Mapping[str, Any]) -> dict[str, str]:
    """What is a plain value of a group's settings: a scheduler may add objects of its own."""
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
            f"after step {step} {name} has other settings on rank {rank} (lr={here}) than on rank "
            f"{other} (lr={there}): the script computes them from a counter of its own, which a "
            "joining node begins anew, or from what only one rank knows",
            hint="run.track(optimizer=optimizer, scheduler=scheduler); keep counters in run.state; "
            "give ReduceLROnPlateau the mean of all ranks: run.mean(len(batch), loss=loss)['loss']",
        )


def differing_names(state: Mapping[str, Any]) -> list[str]:
    """What of ``run.state`` differs between ranks, the same answer on all. Every rank calls it."""
    everyones = all_gather_json({key: _digest(value) for key, value in state.items()})
    names = {name for theirs in everyones for name in theirs}
    return sorted(n for n in names if len({theirs.get(n) for theirs in everyones}) > 1)


def warn_of_differing(names: Sequence[str]) -> None:
    """Warn about what is lost."""
    get_logger().warning(
        "run.state differs between ranks in %s: after the death of a rank all continue with the "
        "values of the lowest rank that lives. Set it on all ranks to the same value; what only "
        "one rank has, send it with value = run.mean(run.is_main, x=value)['x'], which "
        "every rank calls",
        ", ".join(map(repr, names)),
    )


def _digest(value: Any) -> str:
    said = json.dumps(value, sort_keys=True, default=repr).encode()
    return hashlib.blake2b(said, digest_size=8).hexdigest()


def _differing(weights: Weights, *, is_first: bool) -> list[str]:
    """The names whose weights differ from the first one's by more than rounding."""
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
