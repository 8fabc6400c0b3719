"""Steps whose gradients no optimizer has used yet: the everyday loop that accumulates gradients.

``if (i + 1) % 4 == 0: optimizer.step()``: after each of the other three iterations gradients are
held that exist nowhere else. So they do not commit: the data advances, but a recovery returns to
the last iteration after which no tracked optimizer held gradients, and nothing is saved, and no
world changes in order, before the next one.
"""

from __future__ import annotations

from elastic.training.step import Step


class Accumulation:
    """The iterations since the last commit."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self.has_updates = False  # some optimizer stepped, while another one accumulates

    @property
    def since(self) -> int | None:
        """The number of the first step that is not committed; None: all are."""
        return self._steps[0].number if self._steps else None

    def add(self, step: Step) -> None:
        """An iteration has ended, and gradients of it are still to be used."""
        self._steps.append(step)
        self.has_updates = self.has_updates or step.optimizer_stepped

    def end(self, step: Step) -> list[Step]:
        """Optimizers have used all gradients: what is committed now, ``step`` last."""
        steps = [*self._steps, step]
        self.drop()
        return steps

    def take_last(self) -> Step | None:
        """The last iteration, out of here; None if there is none."""
        return self._steps.pop() if self._steps else None

    def drop(self) -> None:
        """The iterations are to be done again, or their gradients are never used."""
        self._steps = []
        self.has_updates = False
