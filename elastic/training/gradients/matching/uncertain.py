"""Gradients that a rank lacks, of single parameters: zeros, if other ranks have some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elastic.errors import TrainingError
from elastic.training.gradients.sharding import like, local_value


@dataclass(frozen=True)
class UncertainGradients:
    """Gradients of a bucket of which this rank lacks some, or all: it does not know yet whether
    others have them."""

    parameters: Sequence[torch.nn.Parameter]
    sums: Sequence[torch.Tensor]  # of this rank's parts
    # Once the sum has ended: ranks with a gradient, by parameter; and by DTensor, those with one of
    # other placements than the parameter's.
    counts: torch.Tensor

    @property
    def users(self) -> list[float]:
        """The numbers of ranks with a gradient."""
        counted: list[float] = self.counts.abs().tolist()  # abs: of complex numbers, too
        return counted[: len(self.parameters)]

    def settle(self, in_replica: Mapping[int, float]) -> None:
        """Create missing gradients, unless no rank has any from its samples.

        ``in_replica``: the counts of all parts, by parameter. An expert without tokens has zeros,
        like its rows in an unsharded model, if another one in the same weight has some.
        """
        for parameter, total, count in zip(self.parameters, self.sums, self.users, strict=True):
            if not in_replica.get(id(parameter), count):
                parameter.grad = None
            elif parameter.grad is None:
                if self.counts[len(self.parameters) :].any():
                    raise _other_placements()
                parameter.grad = like(parameter, total)


def is_elsewhere(parameter: Any) -> bool:
    """Whether a gradient has other placements than its parameter: the ranks' parts of a sum, of a
    parameter that each holds whole (``SequenceParallel``)."""
    gradient = parameter.grad
    return gradient is not None and gradient.placements != parameter.placements


def _other_placements() -> TrainingError:
    return TrainingError(
        "some replicas got a gradient that is a sum over ranks (placement Partial), and others got "
        "none: without fully_shard, they cannot be summed",
        hint="use every layer with SequenceParallel in each backward pass, or "
        'fully_shard(model, mesh=run.mesh["shard"]) with elastic.join(mesh={"shard": 1, …})',
    )


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    return parameter.dtype if parameter.grad is None else parameter.grad.dtype


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of the gradient, or zeros."""
    if parameter.grad is None:
        return torch.zeros_like(local_value(parameter.detach()))
    return local_value(parameter.grad.detach())
