"""Warns of random generators of the script that the loop draws from in every step.

``rng = np.random.default_rng(0)`` selects the data set of the next batch, or draws noise: it is at
its beginning on a joining node and in a restarted job, and a repeated step draws other numbers. It
is not refused, because the numbers may only be for display.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from elastic.telemetry.log import get_logger

REMEDY = (
    "Draw from torch's, NumPy's or random's default generator, which have a seed for each step and "
    "rank, or, for the same numbers on all ranks, from a new generator in each step: "
    'torch.Generator().manual_seed(run.state["step"])'
)
_DRAWS = 3  # steps in a row


class UntrackedGenerators:
    """Observes generators that the training function can reach. One per process."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[int, int]] = {}  # by path: the generator, and its state
        self._draws: dict[str, int] = {}
        self._has_warned = False

    def observe(self, path: str, one: object) -> None:
        """Called for each object and each step of a search."""
        state = None if self._has_warned else _state(one)
        if state is None:
            return
        seed = one.initial_seed() if isinstance(one, torch.Generator) else 0  # it may be set anew
        found = (id(one) ^ seed, state)
        before = self._states.get(path, (0, 0))
        self._states[path] = found
        has_drawn = before[0] == found[0] and before != found
        self._draws[path] = self._draws.get(path, 0) + 1 if has_drawn else 0
        if self._draws[path] >= _DRAWS:
            self._has_warned = True
            get_logger().warning(
                "%s draws random numbers in every step, but is not part of the job's state: it "
                "begins anew on a joining node and in a restarted job, and a repeated step draws "
                "other numbers. %s",
                path,
                REMEDY,
            )


def _state(one: object) -> int | None:
    """A digest of a generator's state; None for other objects."""
    if isinstance(one, torch.Generator):
        return hash(one.get_state().numpy().tobytes()) if one.device.type == "cpu" else None
    if isinstance(one, np.random.Generator):
        return hash(repr(one.bit_generator.state))
    if isinstance(one, np.random.RandomState):
        return hash(repr(one.get_state(legacy=False)))
    return hash(one.getstate()) if isinstance(one, random.Random) else None
