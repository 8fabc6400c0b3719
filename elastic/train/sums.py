"""Numbers that are summed over all ranks with a step's gradients: ``run.sum_with_gradients``.

They follow the gradients of a reduction's first bucket, as control flags do, and need no collective
of their own. The bucket may be in float32 or bfloat16, and the order in which ranks are added is
that of the collective. So each rank has its own place for each number, divided into as many
elements as the bucket's type needs for the 53 bits of a float64, and sends zeros in the other
ranks' places: no rounding takes place, and all ranks add the same float64s, with one rounding of
the total.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch

from elastic.errors import ConfigError, TrainingError
from elastic.groups.collectives import all_gather_json

# Elements for the significand of a float64. float16 cannot hold its exponents.
_PIECES = {torch.float64: 1, torch.float32: 3, torch.bfloat16: 7}

Number = float | torch.Tensor
"""A number, or one on a device, which is not read before it is summed."""


class Sums(Mapping[str, float]):
    """The sums of one step, by name: readable after the backward pass that they were summed with.

    They are the same on all ranks. Raises TrainingError if they are read before.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._own: dict[str, Number] = {}
        self._totals: dict[str, float] | None = None

    def __getitem__(self, name: str) -> float:
        return self._summed()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def __repr__(self) -> str:
        return f"Sums({self._totals if self._totals is not None else 'pending'})"

    def _summed(self) -> dict[str, float]:
        if self._totals is None:
            self._wait()
        if self._totals is None:
            raise TrainingError(
                f"the sum of {', '.join(self._own)} was read before it exists",
                hint="call run.sum_with_gradients before loss.backward(), and read its result "
                "after it; values that are given after the backward pass, and those of a sharded "
                "model, are summed at the end of the step",
            )
        return self._totals


class StepSums:
    """The numbers given and sent in the current step. One per process."""

    def __init__(self) -> None:
        self._rank, self._size = 0, 1
        self._can_follow = False  # gradients, which are summed over the same ranks
        self.places = 0  # of each rank, behind gradients in this world; 0: not used yet
        self._given: Sums | None = None  # not sent yet
        self._sent: list[tuple[Sums, torch.Tensor]] = []  # with what each rank has sent
        self._wait: Callable[[], None] = lambda: None

    def enter_world(
        self, rank: int, size: int, *, can_follow: bool, wait: Callable[[], None]
    ) -> None:
        """Begin a world. ``can_follow``: gradients are summed over all of its ranks. ``wait``:
        waits for sums that are queued on a device."""
        self._rank, self._size, self._can_follow, self._wait = rank, size, can_follow, wait
        self.places = 0
        self.drop()

    @property
    def is_pending(self) -> bool:
        """Whether numbers were given that only the end of the step will sum."""
        return self._given is not None

    def drop(self) -> None:
        """Forget the current step's numbers: it has ended, or is repeated."""
        self._given = None
        self._sent.clear()

    def give(self, values: Mapping[str, object], *, counts: bool) -> Sums:
        """Add to this rank's numbers, which the next reduction sums. ``counts``: they are not those
        of a filler.

        Raises ConfigError for a value that is not a number.
        """
        numbers = {name: _number(name, value) for name, value in values.items()}
        if self._given is None:
            self._given = Sums(lambda: self._wait())
        sums = self._given
        for name, number in numbers.items():
            sums._own[name] = sums._own.get(name, 0.0) + (number if counts else 0.0)
        return sums

    def room(self, dtype: torch.dtype) -> int:
        """How many elements follow the gradients of a reduction's first bucket: in a world, all
        buckets have as many as the largest set of numbers."""
        if not self._can_follow or dtype not in _PIECES:
            return 0
        if self._given is not None:
            self.places = max(self.places, 1 + len(self._given))
        return self.places * self._size * _PIECES[dtype]

    def different(self, others: list[int]) -> TrainingError:
        """The error on a rank that has other :attr:`places` than these ranks."""
        return _different(self._sent[-1][0] if self._sent else {}, others)

    @torch.no_grad()
    def write(self, room: torch.Tensor) -> None:
        """Write this rank's numbers into the :meth:`room` behind gradients."""
        places = room.view(self.places, self._size, _PIECES[room.dtype])
        # An earlier backward pass on a device, whose sums are queued, but not read yet.
        self._sent = [
            (s, p.clone() if p.data_ptr() == places.data_ptr() else p) for s, p in self._sent
        ]
        room.zero_()
        sums, self._given = self._given, None
        if sums is None:
            sums = Sums(self._wait)
        self._sent.append((sums, places))
        numbers: list[Number] = [_digest(sums), *sums._own.values()]
        left = torch.stack(
            [torch.as_tensor(n, dtype=torch.float64, device=room.device) for n in numbers]
        )
        for piece in places[: len(numbers), self._rank].unbind(-1):
            piece.copy_(left)
            left = torch.where(piece.isfinite(), left - piece, 0.0)

    def reduced_alone(self) -> None:
        """A world of one rank has reduced gradients, which no numbers follow."""
        sums, self._given = self._given, None
        if sums is not None:
            sums._totals = {name: float(number) for name, number in sums._own.items()}

    def summed(self) -> None:
        """Read the sums of the reductions, which have ended: their memory is used again.

        Raises TrainingError if ranks have given numbers of different names.
        """
        sent, self._sent = self._sent, []
        for sums, places in sent:
            digests, *rows = places.double().sum(-1).tolist()
            if 0.0 in digests:
                return  # a rank has no gradients for this reduction, which is an error
            others = [rank for rank, d in enumerate(digests) if d != digests[self._rank]]
            if others:
                raise _different(sums, others)
            sums._totals = {name: _total(row) for name, row in zip(sums, rows, strict=False)}

    def sum_rest(self, together: Callable[[], AbstractContextManager[None]]) -> None:
        """Sum the numbers that no gradients have followed, in a collective of their own.
        ``together``: the ranks of a replica leave that context together."""
        if self._size == 1:
            self.reduced_alone()
        sums, self._given = self._given, None
        if sums is None:
            return
        with together():
            gathered = all_gather_json({name: float(n) for name, n in sums._own.items()})
        others = [rank for rank, theirs in enumerate(gathered) if theirs.keys() != sums.keys()]
        if others:
            raise _different(sums, others)
        sums._totals = {name: _total([theirs[name] for theirs in gathered]) for name in sums}


def _number(name: str, value: object) -> Number:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex() or hasattr(value, "full_tensor"):
            what = f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
            raise _refusal(name, what)
        number = value.detach().reshape(()).double()
        return number if number.device.type != "cpu" else float(number)
    if isinstance(value, str | bytes | complex) or not hasattr(value, "__float__"):
        raise _refusal(name, f"a {type(value).__name__}")
    return float(value)


def _refusal(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"run.sum_with_gradients({name}=…): {what} is not a number",
        hint="the sum over this rank's samples: loss=loss.detach() * len(x), samples=len(x)",
    )


def _digest(names: Mapping[str, float]) -> float:
    """A number for the names, which is never 0, as in the places of a rank that sends nothing."""
    return 1.0 + zlib.crc32("\n".join(names).encode())


def _total(numbers: list[float]) -> float:
    """The sum, rounded once, so that it does not depend on the order of ranks."""
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # inf - inf
        return sum(numbers)


def _different(sums: Mapping[str, float], others: list[int]) -> TrainingError:
    own = ", ".join(sums) or "nothing"
    theirs = f"rank {', '.join(map(str, others))} sums" if others else "other ranks sum"
    return TrainingError(
        f"run.sum_with_gradients: this rank sums {own}, but {theirs} other values",
        hint="call it on all ranks with the same names in the same order; for a rank that has no "
        "value, pass 0.0",
    )
