"""Gradient accumulation: steps whose gradients no optimizer has used yet.

With ``if (i + 1) % 4 == 0: optimizer.step()``, after each of the other three iterations this rank
holds gradients that exist nowhere else. So they are not committed: the data advances, but a
recovery returns to the last iteration after which no tracked optimizer held gradients. Until the
next such iteration nothing is saved and no planned change of the world takes place.
"""

from __future__ import annotations

from collections import deque

from elastic.training.step import Step


class Accumulation:
    """The iterations since the last commit."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._lengths: deque[int] = deque(maxlen=2)  # iterations of the last groups
        self._interrupted: int | None = None  # the first step of a group to be repeated

    @property
    def since(self) -> int | None:
        """The number of the first uncommitted step; None if all are committed."""
        return self._steps[0].number if self._steps else None

    def add(self, step: Step) -> None:
        """Add a finished iteration whose gradients are still unused."""
        self._steps.append(step)

    def end(self, step: Step) -> list[Step]:
        """Optimizers have used all gradients: returns the steps to commit, ``step`` last."""
        steps = [*self._steps, step]
        self._lengths.append(len(steps))
        self._interrupted = None
        self.drop()
        return steps

    def shorter_length(self, step: Step) -> tuple[int, int] | None:
        """The iterations of the group that ``step`` ends, and of earlier groups, if the group was
        interrupted before and is shorter.

        A counter that was not reset has already counted some of the repeated batches. A longer
        group has another reason: a batch size that grows during training.
        """
        length = len(self._steps) + 1
        first = step.number if self.since is None else self.since
        usual = self._lengths[0] if len(set(self._lengths)) == 1 and len(self._lengths) == 2 else 1
        is_shorter = self._interrupted == first and length < usual
        return (length, usual) if is_shorter else None

    def interrupt(self, step: Step | None) -> None:
        """After a fault of the world in ``step``: the iterations will be repeated."""
        if self.since is not None:
            self._interrupted = self.since
        elif step is not None:
            self._interrupted = step.number
        self.drop()

    def take_last(self) -> Step | None:
        """Remove and return the last iteration; None if there is none."""
        return self._steps.pop() if self._steps else None

    def drop(self) -> None:
        """Drop the iterations: they are repeated, or their gradients are never used."""
        self._steps = []
