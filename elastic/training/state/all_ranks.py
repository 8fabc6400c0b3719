"""Performs actions that must fail on all ranks if they fail on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from checkpoints import CheckpointError
from elastic.errors import ElasticError, TrainingError, WorldLost
from elastic.process_group import all_gather_json
from elastic.world.world import World

T = TypeVar("T")


def on_all_ranks(world: World, act: Callable[[], T], *, is_loss: bool = False) -> T:
    """Perform an action on every rank. If it fails on one, that rank raises its error, and the
    others raise a TrainingError that names the rank.

    ``is_loss``: the others raise WorldLost instead, and continue without the failed rank.
    """
    error: Exception | None = None
    try:
        result = act()
    except (ElasticError, CheckpointError, ValueError, RuntimeError, OSError, KeyError) as failure:
        error = failure
    report = None if error is None else f"{type(error).__name__}: {error}"
    failures = [(rank, text) for rank, text in enumerate(all_gather_json(report)) if text]
    if error is not None:
        raise error
    if failures:
        rank, text = failures[0]
        # The rank itself shows the hint. A rule in elastic/failures/rules.py matches the sentence.
        why = f"rank {rank} could not restore the state ({text.splitlines()[0]})"
        if is_loss:
            raise WorldLost(why)
        raise TrainingError(f"this rank ends because {why}")
    return result
