"""The current step: which one has begun, the loop that runs it, and what is accumulated."""

from __future__ import annotations

from elastic.training.data.loader import ElasticLoader
from elastic.training.gradients.accumulation import Accumulation
from elastic.training.step import Progress, Step


class CurrentStep:
    """One per process. Written by the step loop and by recovery, read by all components.

    A loop may be left in the middle of a step, by ``break`` or by an exception. As long as nobody
    knows which, the step is neither committed nor dropped, but the script is not inside of it.
    """

    def __init__(self) -> None:
        self.step: Step | None = None  # begun, and neither committed nor dropped
        self.accumulation = Accumulation()
        self.last_left: Step | None = None  # the step in which the script's last loop was left
        # The step before which this rank has said, in advance, whether it leaves its world.
        self.answered_for: int | None = None
        self._loader: ElasticLoader | None = None  # of the step; None: the script's own data
        self._left_loader: ElasticLoader | None = None  # whose loop was left in the step

    def begin(self, step: Step, loader: ElasticLoader | None) -> None:
        """A step is handed to the script."""
        self.step, self._loader, self.answered_for = step, loader, None

    def leave(self, loader: ElasticLoader) -> None:
        """The loop over ``loader`` was left in the middle, for whatever reason."""
        self._left_loader = loader

    def take_left_loader(self) -> ElasticLoader | None:
        """The loader whose loop was left, once."""
        loader, self._left_loader = self._left_loader, None
        return loader

    @property
    def loader(self) -> ElasticLoader | None:
        """Whose step it is; None for data that the script distributes itself."""
        return self._loader

    @property
    def inside(self) -> Step | None:
        """The step that the script is inside of."""
        return self.step if self._left_loader is None else None

    def left_step(self, loader: ElasticLoader) -> Step | None:
        """The step that a loop over ``loader`` was left in, until that is settled."""
        return self.step if self._left_loader is loader else None

    def leading(self, loader: ElasticLoader) -> tuple[ElasticLoader, Step] | None:
        """The other loader that the script is inside a step of, and the step."""
        step, leader = self.inside, self._loader
        if step is None or leader is None or leader is loader:
            return None
        return leader, step

    @property
    def first_number(self) -> int | None:
        """The number of the step that has begun, or of the first one of an accumulation; None
        between two commits. Of the next step, where it is settled that it will begin. Read by the
        link's thread."""
        if (first := self.accumulation.since) is not None:
            return first
        if (following := self.answered_for) is not None:
            return following
        step = self.step
        return step.number if step is not None else None

    def drop(self) -> None:
        """No step has begun any more."""
        self.step = self._loader = self._left_loader = None

    def drop_uncommitted(self) -> None:
        """Neither the step nor the accumulated ones before it have taken effect."""
        step, self.answered_for = self.step, None
        self.drop()
        self.accumulation.interrupt(step)


def logged_at(current: CurrentStep, progress: Progress) -> int:
    """The step that the script logs values for: how many are committed once the present one is.

    After a loop that was left in a step, that step counts if an optimizer has stepped.
    """
    step = current.step
    # Without calling properties: this is asked in every step.
    if step is not None and (current._left_loader is None or step.stepped):
        return step.number + 1
    return progress.step
