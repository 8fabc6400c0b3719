"""The order in which modules are reduced in a step: the same on all ranks, or an error on all.

Collectives are matched by their order alone. If a rank has no gradients of a whole module (a head
for another task, an expert that a router has not chosen), it skips the module's collectives. Its
next ones are then summed with those of the skipped module: with a wrong result if they have the
same size, else gloo ends the process, or ranks wait for each other indefinitely.

A rank cannot know whether the others have such gradients. But all ranks know which modules followed
each other in earlier steps of this world. While a rank follows the only known order, nothing is
sent in addition. A rank that is about to leave this order still sends what the others expect:
zeros, and a flag that says so. If all ranks have sent that flag, they agree on another order, else
there is an error. Where several continuations are known, or none, ranks compare the next module in
a small collective. So they do at the end of a step in which a module was not reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from elastic.errors import TrainingError
from elastic.process_group import (
    RankGroup,
    all_gather_json,
    all_sum,
    complete,
    control_device,
    world_group,
)
from elastic.training.gradients.control_flags import (
    COUNT,
    MODULES_ON_ALL_RANKS,
    are_all_absent,
    is_any_absent,
    others_without,
    write_absent,
    write_present,
)

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
        if not any(unit.accumulates() for unit in self._units):
            with together():
                self._agree(_END)
            self._next.setdefault(_END, {})

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
            raise _without(self.step, expected.name, self._name_of(number), self._groups.kind)
        found: list[int] = all_gather_json(number, self._groups.control)
        if any(other != number for other in found):
            names = [self._name_of(other) for other in found]
            raise _different(self.step, names, self._groups.kind)

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
    found = "; ".join(
        f"{kind} {', '.join(map(str, own))} {f'reduces {name}' if name else 'ends the step'}"
        for name, own in ranks.items()
    )
    return TrainingError(
        f"at step {step}, {kind}s reduce different modules: {found}", hint=MODULES_ON_ALL_RANKS
    )


def _never() -> bool:
    return False
