"""Control flags sent by each rank to all others with the first gradient bucket of a step.

A decision that needs all ranks at the same step (save now, a node is leaving) would cost a
separate collective. The first bucket of gradients is summed over all ranks in every step
anyway, so it is extended by a few elements: each is 1 on a rank that sets the flag, so a sum above
0 means that some rank did. The bucket's memory is extended once, so that no gradient is copied
(docs/decisions/0014).

Two of them encode whether the rank's step number is even or odd. If both are set, gradients of
different steps were summed: a rank has left a step without a backward pass.

The next one is set on every rank, so its sum is the number of ranks, unless gradients were summed
with another collective. NCCL matches collectives by their order alone: if a rank skips one, later
ones of all ranks are summed with others, and small ones end without an error [measured, NCCL 2.28].

Another one is set on ranks that have no gradients of this module and send zeros, before they end
(:mod:`elastic.training.gradients.matching.order`).

The last ones are a digest of weights (:mod:`elastic.training.gradients.weight_digest`), which must
be the same on all ranks. They follow a step's first gradients only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastic.errors import GroupAborted, TrainingError
from elastic.process_group import all_sum
from elastic.training.gradients.weight_digest import BITS

_FLAGS = 7
COUNT = _FLAGS + 2 * BITS  # number of elements
# Indices of the flags of even and odd steps, of all ranks, and of those without gradients.
_PARITY, _PRESENT, _ABSENT = 3, 5, 6


@dataclass(frozen=True)
class StepFlags:
    """The flags that one rank sends with a step's gradients, or the combined received ones."""

    save: bool = False  # rank 0's policy: save after this step
    leaving: bool = False  # this rank's node is draining
    stuck: bool = False  # this rank has no free buffer to save from: its disk hangs


_NOTHING = StepFlags()
SKIP_TOGETHER = (
    "skip a step on all ranks or on none, with a call that every rank makes: "
    "`if run.mean(1.0, bad=float(is_bad))['bad'] > 0: continue`"
)
MODULES_ON_ALL_RANKS = (
    f"{SKIP_TOGETHER}; compute every wrapped module, and every part with its own fully_shard, on "
    "all ranks in each step; where its output is not needed, add it to the loss times zero: "
    "loss = loss + 0.0 * other(x).sum(). Without a mesh, wrap modules that take turns as one, "
    "whose forward chooses: run.wrap(Both(first, second), find_unused_parameters=True) "
    "(docs/how-to/sharded.md, “Modules without gradients”)"
)


class ControlFlags:
    """The flags sent and received in the current step. One per process."""

    def __init__(self) -> None:
        self._sent = StepFlags()
        self._ends: list[tuple[str, torch.Tensor]] = []  # and what they were sent with
        self._step: int | None = None
        self._ranks: int | None = None
        self._nothing: dict[tuple[int | None, torch.dtype, torch.device], torch.Tensor] = {}
        self._digest: torch.Tensor | None = None  # of weights, until it is sent
        self.has_different_weights = False  # digests of this step or an earlier one differ

    def begin_step(
        self, number: int, ranks: int | None = None, digest: torch.Tensor | None = None
    ) -> None:
        """Label the gradients sent next as those of step ``number``; so many ranks send some.
        ``digest``: of weights (:class:`~elastic.training.gradients.weight_digest.WeightDigest`)."""
        self._step, self._ranks, self._digest = number, ranks, digest
        self._ends.clear()

    def abstain(self) -> None:
        """Send no number until the next step begins: only peers have a step, not this rank."""
        self._step = self._digest = None

    def send(self, flags: StepFlags) -> None:
        """Send these flags with the gradients of the next step."""
        self._sent = flags
        self._ends.clear()

    def write(self, end: torch.Tensor, gradients: str = "gradients") -> None:
        """Write the flags into ``end``, which follows ``gradients`` to be summed. Afterwards it
        holds the flags of all ranks."""
        parity = None if self._step is None else self._step % 2
        key = parity, end.dtype, end.device
        pattern = self._nothing.get(key)
        if pattern is None:
            numbers = [0.0] * COUNT
            numbers[_PRESENT] = 1.0
            if parity is not None:
                numbers[_PARITY + parity] = 1.0
            pattern = self._nothing[key] = torch.tensor(numbers, dtype=end.dtype, device=end.device)
        end.copy_(pattern)
        sent = self._sent
        if sent != _NOTHING:
            flags = [float(sent.save), float(sent.leaving), float(sent.stuck)]
            end[:_PARITY] = torch.tensor(flags, dtype=end.dtype, device="cpu")
        self._ends.append((gradients, end))

    def write_digest(self, end: torch.Tensor) -> None:
        """Write the digest of this step's weights into ``end``, unless it is already sent."""
        if self._digest is not None:
            end[_FLAGS:] = self._digest
            self._digest = None

    def forget(self) -> None:
        """Release the buckets of an ended world, and forget what its ranks found."""
        self._ends.clear()
        self._digest, self.has_different_weights = None, False

    def settle(self) -> None:
        """Copy the flags from a GPU after the collectives, before more work is queued."""
        self._ends = [(name, end.cpu()) for name, end in self._ends]

    def received(self) -> StepFlags | None:
        """The flags of all ranks in this step; None if no bucket carried flags."""
        if not self._ends:
            return None
        sums = [end[:_PARITY].tolist() for _, end in self._ends]
        return _flags_of([sum(values) for values in zip(*sums, strict=True)])

    def require_one_step(self, number: int) -> None:
        """``number`` is this rank's step. All ranks raise an error, or none.

        Sets :attr:`has_different_weights` if digests differ.

        Raises:
            TrainingError: ranks have sent gradients of different steps.
            GroupAborted: gradients were summed with another collective.
        """
        sums = [end.tolist() for _, end in self._ends]
        for (_, end), summed in zip(self._ends, sums, strict=True):
            if self._ranks is None or self._ranks > _exact_up_to(end.dtype):
                continue
            if summed[_PRESENT] != self._ranks:
                raise GroupAborted(
                    f"at step {number}, gradients were summed with another collective: a rank has "
                    "skipped a collective, or called it in another order, since the last step",
                    hint="make each call on all ranks: no `if run.is_main:` around barrier(), "
                    "all_reduce() or run.mean()",
                )
        for (name, _), summed in zip(self._ends, sums, strict=True):
            if summed[_ABSENT] > 0:
                raise others_without(name, number)
        if any(min(summed[_PARITY:_PRESENT]) > 0 for summed in sums):
            raise TrainingError(
                f"at step {number}, gradients of different steps were summed: a rank left a "
                "step without a backward pass, by `continue` or after an exception",
                hint=SKIP_TOGETHER,
            )
        if any(have_different_digests(summed) for summed in sums):
            self.has_different_weights = True


def have_different_digests(summed: Sequence[float]) -> bool:
    """Whether ranks have sent different digests of weights. ``summed``: their elements' sums."""
    is_set, is_not_set = summed[_FLAGS:-BITS], summed[-BITS:]
    return any(both > 0 for both in map(min, is_set, is_not_set))


def in_replica(summed: Sequence[float]) -> list[float]:
    """The elements to sum over the ranks of a replica, which hold different weights: only whether
    their digests differ between replicas."""
    is_different = float(have_different_digests(summed))
    return [*summed[:_FLAGS], *[is_different] * (COUNT - _FLAGS)]


def others_without(name: str, step: int) -> TrainingError:
    """The error on a rank that reduces ``name``, which others do not."""
    return TrainingError(
        f"at step {step}, this rank reduces {name}, but other ranks do not: they have left the "
        "step without a backward pass, by `continue` or after an exception, or use other modules",
        hint=MODULES_ON_ALL_RANKS,
    )


def write_present(end: torch.Tensor) -> None:
    """Write into ``end``, which follows gradients to be summed, only that this rank has some."""
    end.zero_()
    end[_PRESENT] = 1.0


def write_absent(nothing: torch.Tensor) -> None:
    """Write into the end of zeros, sent in place of gradients, that this rank has none."""
    nothing[_PRESENT - COUNT] = nothing[_ABSENT - COUNT] = 1.0


def are_all_absent(summed: torch.Tensor) -> bool:
    """Whether no rank had gradients for this sum. (Both are sums of ones: they are equal also where
    these are not exact.)"""
    present, absent = summed[_PRESENT - COUNT], summed[_ABSENT - COUNT]
    return bool(present == absent)


def is_any_absent(end: torch.Tensor) -> bool:
    """Whether a rank had no gradients for the sum that ``end`` follows."""
    return bool(end[_ABSENT] > 0)


def absent(ends: Sequence[torch.Tensor]) -> list[bool]:
    """The same for several sums, with one read of the device."""
    flags = [end[_ABSENT] for end in ends]
    if len({flag.dtype for flag in flags}) > 1:
        flags = [flag.double() for flag in flags]
    return [value > 0 for value in torch.stack(flags).tolist()] if flags else []


class Room:
    """A bucket's gradients in their own memory, followed by room for the flags."""

    def __init__(self, both: torch.Tensor, end: torch.Tensor) -> None:
        self.both = both
        self.end = end

    @classmethod
    def behind(cls, gradients: torch.Tensor) -> Room | None:
        """Add room to a bucket; None if that is impossible, then on every rank."""
        if gradients.layout is not torch.strided or not gradients.is_floating_point():
            return None
        count, storage = gradients.numel(), gradients.untyped_storage()
        size_bytes = count * gradients.element_size()
        longer_bytes = size_bytes + COUNT * gradients.element_size()
        if storage.nbytes() != longer_bytes:
            if storage.nbytes() != size_bytes or not storage.resizable():
                return None
            storage.resize_(longer_bytes)  # all its views keep referring to its memory
        both = gradients.as_strided((count + COUNT,), (1,))
        return cls(both, both[count:])

    def is_behind(self, gradients: torch.Tensor) -> bool:
        """Whether this is the same bucket. No other can have its memory, which is held here."""
        return self.both.data_ptr() == gradients.data_ptr()


def ask(flags: StepFlags) -> StepFlags:
    """Send and receive flags in a separate collective. Every rank calls it."""
    return _flags_of(all_sum([float(flags.save), float(flags.leaving), float(flags.stuck)]))


def _exact_up_to(dtype: torch.dtype) -> int:
    """The largest sum of ones that is exact in a floating dtype.

    >>> _exact_up_to(torch.bfloat16), _exact_up_to(torch.float16)
    (256, 2048)
    """
    return int(2 / torch.finfo(dtype).eps)


def _flags_of(sums: list[float]) -> StepFlags:
    save, leaving, stuck = (value > 0 for value in sums)
    return StepFlags(save=save, leaving=leaving, stuck=stuck)
