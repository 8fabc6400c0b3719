"""A DataLoader that a framework has prepared: the job's in training, the framework's in
evaluation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from elastic.errors import ConfigError
from elastic.train.loader import ElasticLoader
from elastic.train.run import Run


def is_training(models: Iterable[nn.Module]) -> bool:
    """Whether a pass over data trains: with gradients, and one of ``models`` is in training mode,
    if there are any."""
    modes = [model.training for model in models]
    return torch.is_grad_enabled() and (not modes or any(modes))


def batches_of(
    order: Callable[[int], list[int]], loader: DataLoader[Any], ranks: int
) -> Callable[[int], list[list[int]]]:
    """The batches that the ranks of the largest world read together, those of all in turn.
    ``order``: the samples of all, one of each rank in turn."""
    size: Any = loader.batch_size

    def batches(epoch: int) -> list[list[int]]:
        indices = order(epoch)
        each = len(indices) // ranks
        last = each - each % size if loader.drop_last else each
        return [
            indices[rank::ranks][first : first + size]
            for first in range(0, last, size)
            for rank in range(ranks)
        ]

    return batches


def weighted(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """A loss whose gradients count with ``weight``; 0 for a filler."""
    if weight == 1.0:
        return loss
    if not weight:  # not × 0: a NaN of the filler must not reach the gradients
        return torch.where(torch.zeros((), dtype=torch.bool, device=loss.device), loss, 0.0)
    return loss * weight


class PreparedLoader:
    """Iterating it in training yields this rank's share of each step, from the job's position. In
    evaluation it is the framework's own loader for the ranks of the current world.

    ``divide`` makes the job's loader; where data cannot be divided, its ConfigError is raised by
    the first pass that trains: the loader may be meant for evaluation.
    """

    def __init__(
        self, run: Run, given: DataLoader[Any], divide: Callable[[], ElasticLoader]
    ) -> None:
        self._run, self._given = run, given
        self._of_world: tuple[int, Any] | None = None  # the framework's, in a generation
        self._divided: ElasticLoader | ConfigError
        try:
            self._divided = divide()
        except ConfigError as error:
            self._divided = error

    @abstractmethod
    def trains(self) -> bool:
        """Whether a pass that begins now is one of training."""

    @abstractmethod
    def evaluation(self) -> Any:
        """The framework's loader for the ranks of the current world."""

    @abstractmethod
    def to_device(self, batch: Any) -> Any:
        """The batch on the device of this rank."""

    def __getattr__(self, name: str) -> Any:
        # Not the position of a loader with state, which would be saved and loaded.
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._given, name)

    def __len__(self) -> int:
        loader = self._divided
        return len(self.of_world() if isinstance(loader, ConfigError) else loader)

    def __iter__(self) -> Iterator[Any]:
        return self.training() if self.trains() else iter(self.of_world())

    def set_epoch(self, epoch: int) -> None:
        """Without effect: the order of a pass is that of the job's epoch."""

    @property
    def index(self) -> int:
        """The index within the epoch of the current step, or between steps of the next one."""
        return self.job_loader.index

    def training(self) -> Iterator[Any]:
        """The rest of the job's epoch."""
        for batch in self.job_loader:
            yield self.to_device(batch)

    @property
    def job_loader(self) -> ElasticLoader:
        """Raises ConfigError if the data cannot be divided."""
        if isinstance(self._divided, ConfigError):
            raise self._divided
        return self._divided

    def of_world(self) -> Any:
        """:meth:`evaluation`, once for each world."""
        generation = self._run.world.generation if self._run.has_world else 0
        if self._of_world is None or self._of_world[0] != generation:
            self._of_world = generation, self.evaluation()
        return self._of_world[1]
