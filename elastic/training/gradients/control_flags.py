"""What each rank tells all others once per step, as three more numbers behind its gradients.

A decision that needs all ranks at the same step (save now, a node is leaving) would cost a
collective of its own. The first bucket of gradients is summed over all ranks in every step
anyway, so it is made three elements longer: each is 1 where a rank says so, and whoever hears
more than 0 knows that somebody did. The bucket's own memory grows by them, once, so that no
gradient is copied (docs/decisions/0014).
"""

from __future__ import annotations

import torch

from elastic.process_group.collectives import all_sum
from elastic.training.checkpointing.due import StepFlags

_COUNT = 3
_NOTHING = StepFlags()


class ControlFlags:
    """One per process: what this rank says in the step in hand, and what it has heard."""

    def __init__(self) -> None:
        self._said = StepFlags()
        self._ends: list[torch.Tensor] = []

    def say(self, flags: StepFlags) -> None:
        """A step begins: tell all ranks this."""
        self._said = flags
        self._ends.clear()

    def write(self, end: torch.Tensor) -> None:
        """Say the word in ``end``, which is behind gradients that are about to be summed; and
        hear there, once they are, what all have said."""
        said = self._said
        if said == _NOTHING:
            end.zero_()
        else:
            numbers = [float(said.save), float(said.leaving), float(said.stuck)]
            end.copy_(torch.tensor(numbers, dtype=end.dtype))
        self._ends.append(end)

    def forget(self) -> None:
        """Hold no bucket any longer."""
        self._ends.clear()

    def settle(self) -> None:
        """The collectives have ended: copy from a GPU now, before more is queued behind them."""
        self._ends = [end.cpu() for end in self._ends]

    def heard(self) -> StepFlags | None:
        """What anybody has said in this step; None if no bucket has carried words."""
        if not self._ends:
            return None
        sums = [end.tolist() for end in self._ends]
        return _flags_of([sum(values) for values in zip(*sums, strict=True)])


class Room:
    """A bucket's gradients in their own memory, and room for words behind them."""

    def __init__(self, both: torch.Tensor, end: torch.Tensor) -> None:
        self.both = both
        self.end = end

    @classmethod
    def behind(cls, gradients: torch.Tensor) -> Room | None:
        """None if there can be none: the same answer on every rank."""
        if gradients.layout is not torch.strided or not gradients.is_floating_point():
            return None
        count, storage = gradients.numel(), gradients.untyped_storage()
        size_bytes = count * gradients.element_size()
        longer_bytes = size_bytes + _COUNT * gradients.element_size()
        if storage.nbytes() != longer_bytes:
            if storage.nbytes() != size_bytes or not storage.resizable():
                return None
            storage.resize_(longer_bytes)  # all its views go on to see its memory
        both = gradients.as_strided((count + _COUNT,), (1,))
        return cls(both, both[count:])

    def is_behind(self, gradients: torch.Tensor) -> bool:
        """Whether the bucket is still this one. Its memory cannot be another's: it is held here."""
        return self.both.data_ptr() == gradients.data_ptr()


def ask(flags: StepFlags) -> StepFlags:
    """Tell and hear at once, with a collective of its own. Every rank calls it."""
    return _flags_of(all_sum([float(flags.save), float(flags.leaving), float(flags.stuck)]))


def _flags_of(sums: list[float]) -> StepFlags:
    save, leaving, stuck = (value > 0 for value in sums)
    return StepFlags(save=save, leaving=leaving, stuck=stuck)
