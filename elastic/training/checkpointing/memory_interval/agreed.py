"""The interval in use between two saves to memory, the same on all ranks of a world.

A rank's part of a checkpoint in memory is useless without the other ranks' parts, so all must save
the same steps. Measurements differ between ranks. They exchange them at a world's first boundary,
after its second and its fourth save, and then at most every ``AGAIN_STEPS`` steps, with one small
collective. All ranks apply the same function to the same numbers. A joining rank has none, and
adopts the interval of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from elastic.clock import Clock
from elastic.process_group import all_gather_json
from elastic.training.checkpointing.memory_interval.choice import (
    UNMEASURED_STEPS,
    ChosenInterval,
    MemoryCosts,
    choose,
    combine,
)
from elastic.training.checkpointing.memory_interval.meter import CostMeter

AGAIN_STEPS = 100
# A world agrees after this many saves: one counts then, and three, of which one may be an outlier.
_EARLY = (2, 4)

Changed = Callable[[ChosenInterval, int], object]


class MemoryInterval:
    """One per process. ``every_steps``: fixed by the user; None: chosen from measured costs.

    ``changed`` is called with a new choice and the previous interval.
    """

    def __init__(
        self, every_steps: int | None, *, overhead: float, clock: Clock, changed: Changed
    ) -> None:
        self.is_chosen = every_steps is None
        self.first_steps = every_steps or UNMEASURED_STEPS
        self.every_steps = self.first_steps
        self._overhead = overhead
        self._changed = changed
        self.meter = CostMeter(clock)
        self._is_agreed = False  # this rank has taken part in an agreement
        self._agreed_step = 0
        self.enter_world(1)

    def enter_world(self, size: int) -> None:
        """Begin a world: its ranks agree at their first boundary."""
        self._size = size
        self.needs_agreement = self.is_chosen
        self._previous_step = -1
        self.meter.enter_world()

    def agree(self, step: int) -> None:
        """Choose the interval. A collective: all ranks call it at the same boundary."""
        self.needs_agreement = False
        self._agreed_step = step
        own = self.meter.costs(self.every_steps if self._is_agreed else None)
        ranks = [own]
        if self._size > 1:
            ranks = [MemoryCosts(**received) for received in all_gather_json(asdict(own))]
        costs = combine(ranks)
        chosen = choose(costs, self._overhead)
        self._is_agreed = True
        self.every_steps = chosen.every_steps
        before = costs.every_steps or UNMEASURED_STEPS
        if chosen.every_steps != before:
            self._changed(chosen, before)

    def is_due(self, step: int) -> bool:
        """Whether all ranks save at this boundary. Called after the wait for earlier saves."""
        has_ended = self.meter.waited()
        saves = self.meter.saves
        is_again = saves > max(_EARLY) and step - self._agreed_step >= AGAIN_STEPS
        if self.is_chosen and has_ended and (saves in _EARLY or is_again):
            self.needs_agreement = True  # at the next boundary, before its saves
        # With accumulated gradients several steps lie between two boundaries.
        before = self._previous_step if 0 <= self._previous_step < step else step - 1
        self._previous_step = step
        return step // self.every_steps != before // self.every_steps
