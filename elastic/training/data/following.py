"""A second loader, read inside the steps of the first: ``for a, b in zip(loader_a, loader_b)``.

The step belongs to the first loader. The second loader yields its next batches when they are
requested within that step, and advances when the step commits. A fault resets both positions, so a
repeated step reads the same batches from both.

A pass over the second loader begins with an iterator and need not end with the first loader's: it
spans several of them (``next(b)``), ends before one, or is left with one (``zip``). Therefore the
start of its next iterator has a separate rule: the first iterator after a restart or a recovery
resumes at the position; every later one begins a new epoch, if the current one has begun.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from elastic.errors import TrainingError
from elastic.training.data.plan import EpochPlan, Position
from elastic.training.data.sampler import ElasticSampler
from elastic.training.step import Step


@dataclass(eq=False)
class Pass:
    """One iterator over a loader, created by the script."""

    resumes: bool  # resumes in the middle of an epoch
    is_first: bool  # the loader's first iterator in this process
    iterator: weakref.ref[Iterator[Any]] | None = None


class Following:
    """Tracks the batches that a loader has yielded within another's steps. One per loader."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler
        self._pending: tuple[Step, Position] | None = None  # the position once that step commits
        self._newest: Pass | None = None
        self._resumes = True
        self._has_led = self._has_followed = False  # in this process
        self.follows = False  # saved with the position
        self.resets = 0

    # -- positions ----------------------------------------------------------------------------

    def reset(self) -> None:
        """Called after the position was set: batches yielded before do not count."""
        self._pending = None
        self._resumes = True
        self.resets += 1

    def position(self, step: Step) -> Position:
        """The position of the next batch within ``step``."""
        if self._pending is not None and self._pending[0] is step:
            return self._pending[1]
        return self._sampler.position

    def record_batch(self, step: Step) -> Position:
        """Record one more batch within ``step``. Returns the position after it."""
        at = self.position(step)
        self._pending = (step, Position(at.epoch, at.step + 1))
        self._has_followed = self.follows = True
        return self._pending[1]

    def commit(self, step: Step) -> None:
        """Commit the batches yielded within ``step``."""
        pending, self._pending = self._pending, None
        if pending is not None and pending[0] is step:
            self._sampler.seek(pending[1])

    def step_committed(self) -> None:
        """Called after a step of this loader has committed."""
        self._has_led, self.follows = True, False

    # -- passes -------------------------------------------------------------------------------

    def new_pass(self) -> Pass:
        """Called when the script creates an iterator."""
        created = self._newest = Pass(self._resumes, is_first=self._newest is None)
        self._resumes = False
        if self.follows and not created.resumes:
            self.end()
        return created

    def release(self, passed: Pass) -> None:
        """The iterator does not follow another loader; a later one may still resume."""
        self._resumes = self._resumes or (passed is self._newest and passed.resumes)

    def check_leads(self) -> None:
        """Raise TrainingError for a loader that follows another one."""
        if self._has_followed:
            raise self.not_within_a_step()

    def not_within_a_step(self) -> TrainingError:
        """The error for a batch that is requested while the first loader has no step."""
        return TrainingError(
            "this loader yields batches within the steps of another loader, but one was "
            "requested outside of a step",
            hint="request it inside the loop over the first loader; for another use, create a "
            "separate loader: run.loader(DataLoader(…)); to evaluate, use run.shard(loader)",
        )

    def start(self, passed: Pass, *, epochs_are_counted: bool) -> None:
        """Called when the first batch of a pass is requested."""
        if self._has_led:
            raise TrainingError(
                "this loader has defined steps, but is now read within a step of another loader",
                hint="create a separate loader for each use: run.loader(DataLoader(…))",
            )
        self._resumes = False
        is_over = self._sampler.step == self._sampler.plan.steps
        if not passed.resumes or (is_over and not epochs_are_counted):
            self.end()

    def end(self) -> None:
        """End the pass: the next one reads the next epoch, unless this epoch has not begun."""
        at = self._sampler.position if self._pending is None else self._pending[1]
        self._pending = None
        if at.step:
            self._sampler.seek(Position(at.epoch + 1, 0))

    def is_newest(self, passed: Pass) -> bool:
        """Whether this is the script's newest iterator."""
        return passed is self._newest


@lru_cache(maxsize=16)
def same_shares(one: EpochPlan, samples: int, other: EpochPlan, others: int, world: int) -> bool:
    """Whether each rank has the same fraction of two steps of ``samples`` and ``others`` samples.

    >>> same_shares(EpochPlan(100, 8), 8, EpochPlan(100, 4), 4, 2)
    True
    >>> same_shares(EpochPlan(100, 8), 8, EpochPlan(100, 4), 3, 2)
    False
    """
    shares = ((one.share(0, samples, rank, world), rank) for rank in range(world))
    for (first, last), rank in shares:
        start, stop = other.share(0, others, rank, world)
        if (last - first) * others != (stop - start) * samples:
            return False
    return True
