"""One optimizer step in the script's loop, and the job's progress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from elastic.errors import TrainingError
from elastic.hangs.page import DATA, phases
from elastic.torch_private import not_compiled_methods


@dataclass
class Progress:
    """The committed progress of the job. Saved with every checkpoint."""

    step: int = 0  # steps committed since the job began
    commits: int = 0  # with accumulated gradients several steps are committed at once
    epoch: int = 0
    # The last committed step (number, epoch, index), and how many of the callbacks that follow it
    # have not been called: a fault may end the world, or the process, before them.
    last: tuple[int, int, int] = (0, 0, 0)
    callbacks_left: int = 0
    passes: int = 0  # over loaders, begun since the job began
    units: int = 0  # of work between steps, finished by run.once since the job began
    units_before: int = 0  # those before this boundary; later ones are added to it
    calls: int = 0  # of run.retry, completed
    # The loader over which the script's current pass is, or was the last one; empty: none.
    place: str = ""
    # Why weights are copied at the beginning of each step; empty: no step has needed it so far.
    needs_copies: str = ""

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from saved progress; older checkpoints lack some of the fields, or have more."""
        own = vars(Progress())
        vars(self).update(own | {name: saved[name] for name in own.keys() & saved.keys()})


class StepBatch(Protocol):
    """Description of one batch of this rank, such as
    :class:`elastic.train.loader.BatchInfo`."""

    @property
    def epoch(self) -> int:
        """The step's epoch, from 0."""

    @property
    def step(self) -> int:
        """The index of the step within its epoch, from 0."""

    @property
    def micro_batch(self) -> int:
        """The number of this micro-batch within the step, from 0."""

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of this step, the same on every rank."""

    @property
    def rank_indices(self) -> tuple[int, ...]:
        """The dataset indices of this rank in the complete step."""

    @property
    def rank_samples(self) -> int:
        """The number of this rank's samples in the complete step."""

    @property
    def weight(self) -> float:
        """The weight of this micro-batch's mean loss within the rank's share, 0 to 1."""

    @property
    def rank_share(self) -> float:
        """The rank's fraction of the global batch, 0 to 1."""

    @property
    def rank_weight(self) -> float:
        """The weight of the rank's gradients, 0 to 1."""


@dataclass(frozen=True, slots=True)
class OwnBatch:
    """Describes data that the script distributes, the same amount to every rank."""

    epoch: int
    step: int
    size: int  # of the world
    micro_batch: int = 0
    micro_batches: int = 1
    rank_indices: tuple[int, ...] = ()
    rank_samples: int = 0
    weight: float = 1.0

    @property
    def rank_share(self) -> float:
        return 1.0 / self.size

    @property
    def rank_weight(self) -> float:
        return 1.0 / self.size


Batches = Iterator[tuple[StepBatch, Any]]


@not_compiled_methods
class Step:
    """A step of ``run.steps(loader)``: iterate over it for this rank's micro-batches.

    With one micro-batch ``loss.backward()`` is exact. With several, use ``step.backward(loss)``
    or ``(loss * step.weight).backward()``, where ``loss`` is the mean over the micro-batch.
    """

    def __init__(
        self,
        number: int,
        first: tuple[StepBatch, Any],
        rest: Batches,
        begin_micro_batch: Callable[[Step], object],
    ) -> None:
        self.number = number  # within the job, from 0
        self.stepped: list[str] = []  # tracked optimizers whose update is in the weights, in order
        self.is_weighted = False  # the script has read the weight
        self._info: StepBatch
        self._info, self._data = first
        self._count = self._info.micro_batches
        self._rest = rest
        self._begin_micro_batch = begin_micro_batch
        self._begun = 0  # number of micro-batches that have begun
        self._fillers: list[bool] = []  # of them: whether each is one
        self._summed: Counter[tuple[str, ...]] = Counter()  # calls with the same names

    @classmethod
    def past(cls, number: int, epoch: int, index: int, size: int) -> Step:
        """A committed step, for callbacks that are called in the next world."""
        batch = OwnBatch(epoch, index, size)
        return cls(number, (batch, None), iter(()), lambda step: None)

    @property
    def optimizer_stepped(self) -> bool:
        """Whether the weights contain an update of this step."""
        return bool(self.stepped)

    @property
    def epoch(self) -> int:
        """The step's epoch, from 0."""
        return self._info.epoch

    @property
    def index(self) -> int:
        """The index of the step within its epoch, from 0."""
        return self._info.step

    @property
    def indices(self) -> tuple[int, ...]:
        """The dataset indices of this rank's samples."""
        return self._info.rank_indices

    @property
    def samples(self) -> int:
        """The number of this rank's samples in the global batch."""
        return self._info.rank_samples

    @property
    def share(self) -> float:
        """This rank's fraction of the global batch, 0 to 1."""
        return self._info.rank_share

    @property
    def rank_weight(self) -> float:
        """The weight of this rank's gradients in their sum over the ranks, 0 to 1: the share, or
        equal ones (``run.loader(…, weights="equal")``)."""
        return self._info.rank_weight

    @property
    def weight(self) -> float:
        """The weight of the current micro-batch's loss within this rank's; with equal weights of
        the ranks 1, or 0 for a filler."""
        self.is_weighted = True
        return self._info.weight

    @property
    def is_filler(self) -> bool:
        """Whether the current micro-batch has no sample of this rank: its loss has no weight."""
        return self._info.weight == 0.0

    @property
    def micro_batch(self) -> int:
        """The number of the current micro-batch, from 0."""
        return self._info.micro_batch

    @property
    def is_last_micro_batch(self) -> bool:
        """Whether the next backward pass reduces gradients, and optimizers may step after it."""
        return self._begun == self._count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        while self._begun < self._count:
            if self._begun:
                before = phases.enter(DATA)
                self._info, self._data = next(self._rest)
                phases.enter(before)
            yield self._take()

    def _take(self) -> Any:
        self._begun += 1
        self._fillers.append(self.is_filler)
        self._begin_micro_batch(self)
        data, self._data = self._data, None  # do not keep it alive
        return data

    def only_micro_batch(self) -> Any:
        """The data of a step with one micro-batch, for ``for x, y in loader``.

        Raises :class:`~elastic.TrainingError` if it has several.
        """
        if self._count != 1:
            raise TrainingError(
                f"step {self.number} has {self._count} micro-batches, but this loop takes one",
                hint="use `for step in run.steps(loader): for x, y in step: …`",
            )
        return self._take()

    def backward(self, loss: torch.Tensor) -> None:
        """Call ``loss.backward()`` with the correct weight; ``loss`` is the micro-batch's mean."""
        weight = self.weight
        if weight == 0.0:
            # torch.where, not × 0: a NaN of the filler sample must not reach the gradients.
            loss = torch.where(torch.zeros((), dtype=torch.bool, device=loss.device), loss, 0.0)
        elif weight != 1.0:
            loss = loss * weight
        loss.backward()  # type: ignore[no-untyped-call]


def counts_values(step: Step, names: tuple[str, ...]) -> bool:
    """Whether values that the script sums now, under these names, count: not those of a filler.

    They are the current micro-batch's, but a loop that reads the step's micro-batches first sums
    those of the n-th one in its n-th call with the same names.
    """
    number = step._summed[names]
    step._summed[names] += 1
    fillers = step._fillers or [step.is_filler]
    return not fillers[min(number, len(fillers) - 1)]
