"""Gradients that a rank lacks, of single parameters: zeros, if other ranks have some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checkpoints.tensors.dtensors import is_dtensor
from elastic.training.gradients.sharding import like, local_value


@dataclass(frozen=True)
class UncertainGradients:
    """Gradients of a bucket of which this rank lacks some, or all: it does not know yet whether
    others have them."""

    parameters: Sequence[torch.nn.Parameter]
    sums: Sequence[torch.Tensor]  # of this rank's parts
    counts: torch.Tensor  # once the sum has ended: ranks with a gradient, by parameter

    @property
    def users(self) -> list[float]:
        """The numbers of ranks with a gradient."""
        counted: list[float] = self.counts.abs().tolist()  # abs: of complex numbers, too
        return counted

    def settle(self, in_replica: Mapping[int, float]) -> None:
        """Create missing gradients, unless no rank has any from its samples.

        ``in_replica``: the counts of all parts, by parameter. An expert without tokens has zeros,
        like its rows in an unsharded model, if another one in the same weight has some.
        """
        for parameter, total, count in zip(self.parameters, self.sums, self.users, strict=True):
            if not in_replica.get(id(parameter), count):
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = like(parameter, total)


def place_like(parameter: Any) -> None:
    """Give a gradient the placements of its parameter, by collectives of the replica.

    torch leaves that to the optimizer: the gradient of a parameter that each rank holds whole may
    be the ranks' parts of a sum (``SequenceParallel``). Whether it is depends on the number of
    samples: with fewer than ranks, DTensors are not split. So replicas would sum parts with wholes.
    """
    gradient = parameter.grad
    if is_dtensor(gradient) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    return parameter.dtype if parameter.grad is None else parameter.grad.dtype


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of the gradient, or zeros."""
    if parameter.grad is None:
        return torch.zeros_like(local_value(parameter.detach()))
    return local_value(parameter.grad.detach())
