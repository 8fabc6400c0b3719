"""Evaluates a job's save policy between two steps, with the same answer on all ranks.

A policy that depends only on the step is evaluated on each rank. A policy that depends on time or
on saves in flight is evaluated by rank 0 one step ahead; its decision is sent with the gradients of
that step (:mod:`elastic.training.gradients.control_flags`), so that all ranks know it at the same
boundary and no rank waits.
"""

from __future__ import annotations

from checkpoints import SaveContext, SavePolicy
from checkpoints.policies.save import split_by_agreement
from elastic.clock import Clock
from elastic.training.gradients.control_flags import StepFlags

_SMOOTHING = 0.3  # exponential smoothing of the cost of a save


class Due:
    """Evaluates a policy and provides its context. All times are from one monotonic clock."""

    def __init__(self, when: SavePolicy, clock: Clock) -> None:
        self.when = when
        self.failures = 0  # known number of broken worlds
        self._clock = clock
        self._rank, self._size = 0, 1
        self._began_s = self._saved_s = clock.monotonic()
        self._cost_s = 0.0
        self._knows_of_leaving = False
        # In this world: the steps of the last two evaluations.
        self._steps: tuple[int | None, int | None] = (None, None)

    def enter(self, *, rank: int, size: int) -> None:
        """Reset for a new world."""
        self._rank, self._size = rank, size
        self._knows_of_leaving = False
        self._steps = (None, None)

    def observed(self, running_s: float, failures: int) -> None:
        """Add the history from earlier processes of this job."""
        self._began_s -= running_s
        self.failures += failures

    @property
    def needs_agreement(self) -> bool:
        """Whether rank 0 decides for all ranks."""
        return self._size > 1 and self.when.needs_agreement

    def saved(self) -> None:
        """Record the start of a save."""
        self._saved_s = self._clock.monotonic()

    def measured(self, stall_s: float) -> None:
        """Record the time that a save blocked training."""
        before_s = self._cost_s or stall_s
        self._cost_s = before_s + _SMOOTHING * (stall_s - before_s)

    def is_due(
        self, step: int, saved_step: int, received: StepFlags | None, in_flight: int = 0
    ) -> bool:
        """Whether all ranks save now, with ``step`` steps done."""
        if step != self._steps[0]:
            self._steps = step, self._steps[0]
        if received is not None and received.stuck:
            return False  # one rank cannot save: a checkpoint needs the shares of all
        is_leaving = received is not None and received.leaving
        preempted = is_leaving and not self._knows_of_leaving  # reported once
        self._knows_of_leaving = is_leaving
        context = self._save_context(step, saved_step, in_flight, preempted)
        local, agreed = split_by_agreement(self.when)
        if local is not None and local(context):
            return True
        if agreed is None:
            return False
        if self._size == 1:
            return agreed(context)
        return received is not None and received.save and step > saved_step

    def is_due_before_leaving(self, step: int, saved_step: int, in_flight: int) -> bool:
        """Whether all ranks save at the boundary at which nodes leave. Not if the control flags of
        an earlier step carried the notice."""
        local, _ = split_by_agreement(self.when)
        if local is None or self._knows_of_leaving:
            return False
        return local(self._save_context(step, saved_step, in_flight, True))

    def wants(self, step: int, saved_step: int, in_flight: int) -> bool:
        """Rank 0: whether all ranks save at ``step``, the next boundary."""
        _, agreed = split_by_agreement(self.when)
        if agreed is None or self._rank != 0 or self._size == 1:
            return False
        return agreed(self._save_context(step, saved_step, in_flight, False))

    def _save_context(
        self, step: int, saved_step: int, in_flight: int, preempted: bool
    ) -> SaveContext:
        return SaveContext(
            step=step,
            now_s=self._clock.monotonic(),
            began_s=self._began_s,
            saved_step=saved_step,
            saved_s=self._saved_s,
            in_flight=in_flight,
            preempted=preempted,
            save_cost_s=self._cost_s,
            failures=self.failures,
            previous_step=self._steps[step == self._steps[0]],
        )
