"""The order of reductions, and the flags that ranks exchange with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from elastic.errors import GroupAborted, TrainingError
from elastic.groups.collectives import (
    RankGroup,
    all_gather_json,
    all_sum,
    complete,
    control_device,
    world_group,
)
from elastic.train.sums import StepSums
from elastic.train.weight_digest import BITS

# ----------------------------------------------------------------------------
# Control flags sent by each rank to all others with the first gradient bucket of a step.
#
# A decision that needs all ranks at the same step (save now, a node is leaving) would cost a
# separate collective. The first bucket of gradients is summed over all ranks in every step anyway,
# so it is extended by a few elements: each is 1 on a rank that sets the flag, so a sum above 0
# means that some rank did. The bucket's memory is extended once, so that no gradient is copied
# (docs/decisions/0014).
#
# Two of them encode whether the rank's step number is even or odd. If both are set, gradients of
# different steps were summed: a rank has left a step without a backward pass.
#
# The next one is set on every rank, so its sum is the number of ranks, unless gradients were
# summed with another collective. NCCL matches collectives by their order alone: if a rank skips
# one, later ones of all ranks are summed with others, and small ones end without an error
# [measured, NCCL 2.28].
#
# Another one is set on ranks that have no gradients of this module and send zeros, before they end
# .
#
# The last ones are a digest of weights (:mod:`elastic.train.weight_digest`), which
# must be the same on all ranks. They follow a step's first gradients only.

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
    "(docs/reference/sharded.md, “Modules without gradients”)"
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
        self.has_sent_digest = False  # in this step
        self.has_different_weights = False  # digests of this step or an earlier one differ

    def begin_step(
        self, number: int, ranks: int | None = None, digest: torch.Tensor | None = None
    ) -> None:
        """Label the gradients sent next as those of step ``number``; so many ranks send some.
        ``digest``: of weights (:class:`~elastic.train.weight_digest.WeightDigest`)."""
        self._step, self._ranks, self._digest = number, ranks, digest
        self.has_sent_digest = False
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
            self._digest, self.has_sent_digest = None, True

    def forget(self) -> None:
        """Release the buckets of an ended world, and forget what its ranks found."""
        self._ends.clear()
        self._digest, self.has_different_weights = None, False

    def keep(self, place: torch.Tensor) -> None:
        """Copy the flags that earlier backward passes of this step have received in ``place``:
        numbers that follow gradients only from now on will be written over them."""
        known = ((n, end, end.data_ptr() == place.data_ptr()) for n, end in self._ends)
        self._ends = [(n, end.clone() if is_there else end) for n, end, is_there in known]

    def copy_to_host(self) -> None:
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
    if len({(flag.dtype, flag.device) for flag in flags}) > 1:
        flags = [flag.double().cpu() for flag in flags]
    return [value > 0 for value in torch.stack(flags).tolist()] if flags else []


class Room:
    """A bucket's gradients in their own memory, followed by room for numbers and for the flags."""

    def __init__(self, both: torch.Tensor, numbers: torch.Tensor, end: torch.Tensor) -> None:
        self.both = both
        self.numbers = numbers  # of run.sum_with_gradients
        self.end = end

    @classmethod
    def behind(
        cls, gradients: torch.Tensor, numbers: int = 0, known: Room | None = None
    ) -> Room | None:
        """Add room to a bucket, with so many elements for numbers; None if that is impossible, then
        on every rank. ``known``: the room that was added to a bucket before, if any."""
        if gradients.layout is not torch.strided or not gradients.is_floating_point():
            return None
        count, storage = gradients.numel(), gradients.untyped_storage()
        element_bytes = gradients.element_size()
        longer_bytes = (count + numbers + COUNT) * element_bytes
        if storage.nbytes() != longer_bytes:
            is_own = known is not None and known.is_behind(gradients)
            is_whole = storage.nbytes() == count * element_bytes
            if not (is_own or is_whole) or not storage.resizable():
                return None
            storage.resize_(longer_bytes)  # all its views keep referring to its memory
        both = gradients.as_strided((count + numbers + COUNT,), (1,))
        return cls(both, both[count:-COUNT], both[-COUNT:])

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


# ----------------------------------------------------------------------------
# The order in which modules are reduced in a step: the same on all ranks, or an error on all.
#
# Collectives are matched by their order alone. If a rank has no gradients of a whole module (a
# head for another task, an expert that a router has not chosen), it skips the module's
# collectives. Its next ones are then summed with those of the skipped module: with a wrong result
# if they have the same size, else gloo ends the process, or ranks wait for each other
# indefinitely.
#
# A rank cannot know whether the others have such gradients. But all ranks know which modules
# followed each other in earlier steps of this world. While a rank follows the only known order,
# nothing is sent in addition. A rank that is about to leave this order still sends what the others
# expect: zeros, and a flag that says so. If all ranks have sent that flag, they agree on another
# order, else there is an error. Where several continuations are known, or none, ranks compare the
# next module in a small collective. So they do at the end of a step in which a module was not
# reduced.

_Known: TypeAlias = "dict[int, _Known]"
"""The units known to follow, and what follows each of them."""

_END, _VALUES = -1, -2  # of a step; the values of run.mean()


@dataclass(frozen=True)
class Sent:
    """The first tensor of a reduction, which ends with control flags."""

    count: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Sent:
        return cls(tensor.numel(), tensor.dtype, tensor.device)


@dataclass(eq=False)
class Unit:
    """What is reduced together: a module, or one of its parts under ``fully_shard``.

    ``is_trained``: whether it has parameters that need gradients. ``accumulates``: whether it holds
    gradients that are reduced in a later step.
    """

    module: str  # the name in the job of the module that contains it
    name: str
    is_trained: Callable[[], bool]
    accumulates: Callable[[], bool]
    number: int = 0
    is_done: bool = False  # in this step
    sent: Sent | None = None  # None: ranks agree before each reduction


@dataclass
class _Groups:
    """The ranks that reduce together: for gradients, and for small messages between hosts."""

    gradients: RankGroup
    control: RankGroup
    kind: str  # what a member of the groups represents: "rank" or "replica"


@dataclass
class ReductionOrder:
    """The order of this process. Without a world of several ranks nothing is compared."""

    _units: list[Unit] = field(default_factory=list)
    _groups: _Groups | None = None
    _known: _Known = field(default_factory=dict)  # from the beginning of a step
    _next: _Known = field(default_factory=dict)  # from here
    step: int = 0  # the current one
    sums: StepSums = field(default_factory=StepSums)  # follow the gradients
    _is_in_step: bool = False
    _values: Unit = field(
        default_factory=lambda: Unit("", "the values of run.mean()", _never, _never, _VALUES)
    )

    def add(self, unit: Unit) -> Unit:
        """Add a unit; on all ranks in the same order."""
        unit.number = len(self._units)
        self._units.append(unit)
        return unit

    def keep(self, modules: Collection[str]) -> None:
        """Forget all modules except these."""
        self._units = [unit for unit in self._units if unit.module in modules]
        for number, unit in enumerate(self._units):
            unit.number = number
        self._forget()

    def enter_world(self, gradients: RankGroup, control: RankGroup, *, kind: str) -> None:
        """Begin a world, in which no order is known. ``kind``: what a member of the groups
        represents, "rank" or "replica"."""
        self._groups = _Groups(gradients, control, kind) if gradients.size > 1 else None
        self._forget()

    def _forget(self) -> None:
        self._next = self._known = {}
        self._is_in_step = False
        for unit in (*self._units, self._values):
            unit.sent, unit.is_done = None, False

    def leave_world(self) -> None:
        """Release the world's groups."""
        self._groups = None

    def begin_step(self, number: int) -> None:
        """Begin step ``number``."""
        self.step, self._is_in_step = number, True
        self.begin_again()

    def begin_again(self) -> None:
        """Begin the step of peers, in which this rank only takes part in reductions."""
        self._next = self._known
        for unit in self._units:
            unit.is_done = False

    def before(self, unit: Unit, sent: Sent | None) -> None:
        """Return if all ranks are about to reduce ``unit``, else raise TrainingError on each.

        ``sent``: its first tensor; None if it cannot have control flags.
        """
        if self._groups is None:
            return
        if self._expected() is not unit or unit.sent != sent:
            self._agree(unit.number)
        unit.sent, unit.is_done = sent, True
        self._next = self._next.setdefault(unit.number, {})

    def before_once(self, unit: Unit) -> None:
        """The same for a collective of this unit that takes place once in a world, and after which
        it sends other tensors."""
        if self._groups is not None:
            self._agree(unit.number)
            unit.sent = None

    def sum_values(self, values: Sequence[float]) -> list[float]:
        """The sum of each value over all ranks of the world, for ``run.mean()``. Raises
        TrainingError if other ranks do not call it now, but reduce a module."""
        if self._groups is None or not self._is_in_step or not self._lacks_modules:
            return all_sum(values)
        device = control_device()
        both = torch.tensor([*values, *[0.0] * COUNT], dtype=torch.float64, device=device)
        write_present(both[-COUNT:])
        self.before(self._values, Sent.of(both))
        complete(world_group().all_reduce(both), device)
        if is_any_absent(both[-COUNT:]):
            raise others_without(self._values.name, self.step)
        return [float(value) for value in both[:-COUNT].tolist()]

    def end_step(self, together: Callable[[], AbstractContextManager[None]]) -> None:
        """Return if all ranks end this step here, else raise TrainingError on each.

        They agree on that if some module was not reduced, or if another reduction has followed in
        an earlier step. ``together``: the ranks of a replica leave that context together.
        """
        self._is_in_step = False
        if self._groups is None or not (self._next or self._lacks_modules):
            return
        if not self.accumulates:
            with together():
                self._agree(_END)
            self._next.setdefault(_END, {})

    @property
    def accumulates(self) -> bool:
        """Whether a module holds gradients that are reduced in a later step."""
        return any(unit.accumulates() for unit in self._units)

    @property
    def _lacks_modules(self) -> bool:
        """Whether some module was not reduced in this step."""
        return any(not unit.is_done and unit.is_trained() for unit in self._units)

    def _expected(self) -> Unit | None:
        """The only unit that can follow, if it can be recognised by its flags."""
        if len(self._next) != 1:
            return None
        (number,) = self._next
        unit = self._values if number == _VALUES else self._units[number] if number >= 0 else None
        return unit if unit is not None and unit.sent is not None else None

    def _agree(self, number: int) -> None:
        """Raise TrainingError unless all ranks continue with this unit."""
        assert self._groups is not None
        expected = self._expected()
        if expected is not None and not self._are_all_without(expected):
            if expected.number == number:  # with another size
                raise self.sums.different([])
            raise _without(self.step, expected.name, self._name_of(number), self._groups.kind)
        # Buckets with room for other numbers of values have other sizes, which ends the process.
        own = [number, self.sums.places]
        gathered: list[list[int]] = all_gather_json(own, self._groups.control)
        if any(other != number for other, _ in gathered):
            names = [self._name_of(other) for other, _ in gathered]
            raise _different(self.step, names, self._groups.kind)
        others = [rank for rank, (_, places) in enumerate(gathered) if places != self.sums.places]
        if others:
            raise self.sums.different(others)

    def _are_all_without(self, expected: Unit) -> bool:
        """Send zeros in place of this unit's gradients, and a flag. Whether all ranks did."""
        assert self._groups is not None and expected.sent is not None
        sent = expected.sent
        group = world_group() if expected is self._values else self._groups.gradients
        nothing = torch.zeros(sent.count, dtype=sent.dtype, device=sent.device)
        write_absent(nothing)
        complete(group.all_reduce(nothing), sent.device, group)
        return are_all_absent(nothing)

    def _name_of(self, number: int) -> str:
        named = {_END: "", _VALUES: self._values.name}
        return named[number] if number in named else self._units[number].name


def _without(step: int, name: str, own: str, kind: str) -> TrainingError:
    """The error on a rank that does not reduce ``name``, but ``own``, or ends the step."""
    instead = f"reduces {own}" if own else "ends the step without it, by `continue` for example"
    return TrainingError(
        f"at step {step}, other {kind}s reduce {name}, but this {kind} {instead}",
        hint=MODULES_ON_ALL_RANKS,
    )


def _different(step: int, names: list[str], kind: str) -> TrainingError:
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    listed = "; ".join(
        f"{kind} {', '.join(map(str, own))} {f'reduces {name}' if name else 'ends the step'}"
        for name, own in ranks.items()
    )
    return TrainingError(
        f"at step {step}, {kind}s reduce different modules: {listed}", hint=MODULES_ON_ALL_RANKS
    )


def _never() -> bool:
    return False
