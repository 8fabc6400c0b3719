"""What each rank tells all others once per step, as three more numbers behind its gradients.

A decision that needs all ranks at the same step (save now, a node is leaving) would cost a
collective of its own. The first bucket of gradients is summed over all ranks in every step
anyway, so it is made three elements longer: each is 1 where a rank says so, and whoever hears
more than 0 knows that somebody did. The weighting of the gradients writes into the longer buffer
instead of in place, so nothing is copied more often than before (docs/decisions/0014).
"""

from __future__ import annotations

import torch

from elastic.training.due import Word
from elastic.worker.collectives import all_sum

# A larger first bucket (one huge tensor) is not worth a second copy of it: words then cost a
# collective of their own, for policies that cannot do without.
LARGEST_BUCKET_BYTES = 4 << 20
_COUNT = 3


class Words:
    """One per process: what this rank says in the step in hand, and what it has heard."""

    def __init__(self) -> None:
        self._said = Word()
        self._ends: list[torch.Tensor] = []

    def say(self, word: Word) -> None:
        """A step begins: tell all ranks this."""
        self._said = word
        self._ends.clear()

    def append(
        self, gradients: torch.Tensor, weight: float, room: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Weighted gradients with the words behind them, in ``room`` if that fits.

        None if they cannot be carried: the same answer on every rank.
        """
        size_bytes = gradients.numel() * gradients.element_size()
        if size_bytes > LARGEST_BUCKET_BYTES or not gradients.is_floating_point():
            return None
        count = gradients.numel()
        if room is None or room.numel() != count + _COUNT or not _alike(room, gradients):
            room = gradients.new_empty(count + _COUNT)
        if weight == 0.0:
            room[:count].zero_()  # × 0 would keep a NaN of the sample that only filled a gap
        else:
            torch.mul(gradients, weight, out=room[:count])
        said = self._said
        end = [float(said.save), float(said.leaving), float(said.stuck)]
        room[count:].copy_(torch.tensor(end, dtype=room.dtype))
        return room

    def hear(self, end: torch.Tensor) -> None:
        """The summed words of a bucket; on a GPU perhaps not there yet."""
        self._ends.append(end)

    def settle(self) -> None:
        """The collectives have ended: copy from a GPU now, before more is queued behind them."""
        self._ends = [end.cpu() for end in self._ends]

    def heard(self) -> Word | None:
        """What anybody has said in this step; None if no bucket has carried words."""
        if not self._ends:
            return None
        sums = [end.tolist() for end in self._ends]
        return _word([sum(values) for values in zip(*sums, strict=True)])


def ask(word: Word) -> Word:
    """Tell and hear at once, with a collective of its own. Every rank calls it."""
    return _word(all_sum([float(word.save), float(word.leaving), float(word.stuck)]))


def _word(sums: list[float]) -> Word:
    save, leaving, stuck = (value > 0 for value in sums)
    return Word(save=save, leaving=leaving, stuck=stuck)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device
