"""When a job saves: its policy, evaluated between two steps so that all ranks get one answer.

A policy that depends only on the step is evaluated on each rank. One that depends on time, or on
what is in flight, rank 0 decides one step ahead; its decision travels with the gradients of that
step (:mod:`elastic.training.gradients.control_flags`), so that all ranks know it at the same
boundary and no rank waits.
"""

from __future__ import annotations

from checkpoints import SaveContext, SavePolicy
from checkpoints.policies.save import split_by_agreement
from elastic.clock import Clock
from elastic.training.gradients.control_flags import StepFlags

_SMOOTHING = 0.3  # of the cost of a save


class Due:
    """Evaluates a policy and provides its context. Times are of one monotonic clock."""

    def __init__(self, when: SavePolicy, clock: Clock) -> None:
        self.when = when
        self.failures = 0  # worlds that broke, as far as is known
        self._clock = clock
        self._rank, self._size = 0, 1
        self._began_s = self._saved_s = clock.monotonic()
        self._cost_s = 0.0
        self._knows_of_leaving = False
        # In this world: the step of the last evaluation, and the one before.
        self._steps: tuple[int | None, int | None] = (None, None)

    def enter(self, *, rank: int, size: int) -> None:
        """A new world."""
        self._rank, self._size = rank, size
        self._knows_of_leaving = False
        self._steps = (None, None)

    def observed(self, running_s: float, failures: int) -> None:
        """What earlier processes of this job have seen."""
        self._began_s -= running_s
        self.failures += failures

    @property
    def needs_agreement(self) -> bool:
        """Whether rank 0 has to decide."""
        return self._size > 1 and self.when.needs_agreement

    def saved(self) -> None:
        """A save begins now."""
        self._saved_s = self._clock.monotonic()

    def measured(self, stall_s: float) -> None:
        """What a save has cost training."""
        before_s = self._cost_s or stall_s
        self._cost_s = before_s + _SMOOTHING * (stall_s - before_s)

    def is_due(
        self, step: int, saved_step: int, received: StepFlags | None, in_flight: int = 0
    ) -> bool:
        """Whether all ranks save now, with ``step`` steps done."""
        if step != self._steps[0]:
            self._steps = step, self._steps[0]
        if received is not None and received.stuck:
            return False  # one cannot: a checkpoint without its share is none
        is_leaving = received is not None and received.leaving
        preempted = is_leaving and not self._knows_of_leaving  # news, once
        self._knows_of_leaving = is_leaving
        moment = self._moment(step, saved_step, in_flight, preempted)
        local, agreed = split_by_agreement(self.when)
        if local is not None and local(moment):
            return True
        if agreed is None:
            return False
        if self._size == 1:
            return agreed(moment)
        return received is not None and received.save and step > saved_step

    def wants(self, step: int, saved_step: int, in_flight: int) -> bool:
        """Rank 0: whether all shall save at ``step``, the next boundary."""
        _, agreed = split_by_agreement(self.when)
        if agreed is None or self._rank != 0 or self._size == 1:
            return False
        return agreed(self._moment(step, saved_step, in_flight, False))

    def _moment(self, step: int, saved_step: int, in_flight: int, preempted: bool) -> SaveContext:
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
