"""Flags of each rank for all others, piggybacked on the first gradient bucket of a step.

A decision that needs all ranks at the same step (save now, a node is leaving) would cost a
separate collective. The first bucket of gradients is summed over all ranks in every step
anyway, so it is made three elements longer: each is 1 on a rank that sets the flag, so a sum above
0 means that some rank did. The bucket's own memory grows by them, once, so that no
gradient is copied (docs/decisions/0014).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elastic.process_group import all_sum

_COUNT = 3


@dataclass(frozen=True)
class StepFlags:
    """The flags of one rank, sent with a step's gradients; or those of any rank, received."""

    save: bool = False  # rank 0's policy: save after this step
    leaving: bool = False  # this rank's node drains
    stuck: bool = False  # this rank has no buffer to save from: its disk hangs


_NOTHING = StepFlags()


class ControlFlags:
    """One per process: the flags that this rank sends in the current step, and those received."""

    def __init__(self) -> None:
        self._sent = StepFlags()
        self._ends: list[torch.Tensor] = []

    def send(self, flags: StepFlags) -> None:
        """A step begins: send these flags with its gradients."""
        self._sent = flags
        self._ends.clear()

    def write(self, end: torch.Tensor) -> None:
        """Write the flags into ``end``, which follows gradients that are about to be summed; the
        flags of all ranks are read from there once they are."""
        sent = self._sent
        if sent == _NOTHING:
            end.zero_()
        else:
            numbers = [float(sent.save), float(sent.leaving), float(sent.stuck)]
            end.copy_(torch.tensor(numbers, dtype=end.dtype))
        self._ends.append(end)

    def forget(self) -> None:
        """Release the buckets."""
        self._ends.clear()

    def settle(self) -> None:
        """The collectives have ended: copy from a GPU now, before more is queued."""
        self._ends = [end.cpu() for end in self._ends]

    def received(self) -> StepFlags | None:
        """The flags of all ranks in this step; None if no bucket has carried any."""
        if not self._ends:
            return None
        sums = [end.tolist() for end in self._ends]
        return _flags_of([sum(values) for values in zip(*sums, strict=True)])


class Room:
    """A bucket's gradients in their own memory, followed by room for the flags."""

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
            storage.resize_(longer_bytes)  # all its views keep referring to its memory
        both = gradients.as_strided((count + _COUNT,), (1,))
        return cls(both, both[count:])

    def is_behind(self, gradients: torch.Tensor) -> bool:
        """Whether the bucket is still this one. Its memory cannot be another's: it is held here."""
        return self.both.data_ptr() == gradients.data_ptr()


def ask(flags: StepFlags) -> StepFlags:
    """Send and receive at once, with a separate collective. Every rank calls it."""
    return _flags_of(all_sum([float(flags.save), float(flags.leaving), float(flags.stuck)]))


def _flags_of(sums: list[float]) -> StepFlags:
    save, leaving, stuck = (value > 0 for value in sums)
    return StepFlags(save=save, leaving=leaving, stuck=stuck)
