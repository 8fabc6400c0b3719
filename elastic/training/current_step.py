"""The current step, the loop that runs it, and the accumulation it belongs to."""

from __future__ import annotations

from elastic.training.data.loader import ElasticLoader
from elastic.training.gradients.accumulation import Accumulation
from elastic.training.step import Progress, Step


class CurrentStep:
    """The current step. One per process; written by the step loop and by recovery, read by all.

    A loop may be left in the middle of a step, by ``break`` or by an exception. Until it is known
    which, the step is neither committed nor dropped, and the script is not inside it.
    """

    def __init__(self) -> None:
        self.step: Step | None = None  # begun, and neither committed nor dropped
        self.accumulation = Accumulation()
        self.is_committing = False  # dropped, but the last commit is still the one before it
        self.last_left: Step | None = None  # the step in which the script left its last loop
        # The step before which this rank has announced whether it leaves its world.
        self.announced_for: int | None = None
        self._loader: ElasticLoader | None = None  # None: data that the script distributes itself
        self._left_loader: ElasticLoader | None = None  # the loop over it was left in the step
        self._is_evaluating = False  # the script has read other samples than the step's

    def begin(self, step: Step, loader: ElasticLoader | None) -> None:
        """Record that a step is passed to the script."""
        self.step, self._loader, self.announced_for = step, loader, None
        self._is_evaluating = False

    def evaluation_begins(self) -> None:
        """Record that the script reads samples of ``run.shard``. The last step of an epoch may not
        have ended: ``next(batches)`` is called for each batch, but not for the end of the data."""
        self._is_evaluating = True

    def leave(self, loader: ElasticLoader) -> None:
        """Record that the loop over ``loader`` was left in the middle, for any reason."""
        self._left_loader = loader

    def take_left_loader(self) -> ElasticLoader | None:
        """Return and forget the loader whose loop was left."""
        loader, self._left_loader = self._left_loader, None
        return loader

    @property
    def loader(self) -> ElasticLoader | None:
        """The loader of the step; None for data that the script distributes itself."""
        return self._loader

    @property
    def inside(self) -> Step | None:
        """The step that the script is in; None outside of steps."""
        return self.step if self._left_loader is None else None

    @property
    def lacks_samples(self) -> bool:
        """Whether the script is in a step that has no sample of this rank, but a filler, and has
        not read samples of an evaluation since: those count."""
        step = self.inside
        is_filled = step is not None and self._loader is not None and step.samples == 0
        return is_filled and not self._is_evaluating

    def left_step(self, loader: ElasticLoader) -> Step | None:
        """The step in which a loop over ``loader`` was left, until it is committed or dropped."""
        return self.step if self._left_loader is loader else None

    def leading(self, loader: ElasticLoader) -> tuple[ElasticLoader, Step] | None:
        """Another loader that has a current step, and the step; None if there is none."""
        step, leader = self.inside, self._loader
        if step is None or leader is None or leader is loader:
            return None
        return leader, step

    @property
    def first_number(self) -> int | None:
        """The number of the current step, or of the first step of an accumulation.

        The next step's number once this rank has announced that it stays for it; None between two
        commits otherwise. Read by the link's thread.
        """
        if (first := self.accumulation.since) is not None:
            return first
        if (following := self.announced_for) is not None:
            return following
        step = self.step
        return step.number if step is not None else None

    def drop(self) -> None:
        """End the current step."""
        self.step = self._loader = self._left_loader = None

    def drop_uncommitted(self) -> None:
        """Drop the step and the accumulated ones before it: none has taken effect."""
        step, self.announced_for = self.step, None
        self.drop()
        self.accumulation.interrupt(step)


def logged_at(current: CurrentStep, progress: Progress) -> int:
    """The step to log values for: the number of committed steps once the current one commits.

    After a loop that was left in a step, that step counts if an optimizer has stepped.
    """
    step = current.step
    # No properties are called: this runs in every step.
    if step is not None and (current._left_loader is None or step.stepped):
        return step.number + 1
    return progress.step
