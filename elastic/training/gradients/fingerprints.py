"""Fingerprints of the gradients with which a module's first update was made.

Ranks that see the same samples (along ``tp`` and ``ep``) hold some parameters whole and update each
for itself, so their gradients must be the same. They are not if every rank creates its own experts
under the same names, or if the backward pass leaves partial gradients. A fingerprint is a few
numbers; ranks compare them with the weights (:mod:`elastic.training.gradients.same_parts`).
Nothing is computed after a comparison without a difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from checkpoints.tensors.dtensors import is_dtensor
from elastic.training.gradients.sharding import local_value

SIGNS = 4  # sums with pseudo-random signs: their differences are about the norm of the difference
_BLOCK, _ROWS = 1 << 16, 64  # elements with signs of their own, and blocks that are read at once

Parameters = Callable[[], Sequence[torch.Tensor]]
Fingerprint = list[float]
"""The norm of a gradient and its :data:`SIGNS` sums; empty: no gradient."""


class HeldParts(NamedTuple):
    """This rank's parts of a module's parameters, in order."""

    names: Sequence[str]
    first_holders: Sequence[int]  # the first rank of the replica with the same part, for each
    gradients: Sequence[Fingerprint] = ()  # of their last update; empty once they were compared


class GradientFingerprints:
    """Takes the fingerprints of some parameters after each update, until they are compared."""

    def __init__(self, indices: Collection[int], current: Parameters) -> None:
        self.taken: list[Fingerprint] = [[] for _ in current()]
        self._indices, self._current = indices, current
        self._handle: Any = None
        self._is_done = not indices

    def begin(self) -> None:
        """Take fingerprints from now on, unless they were compared."""
        if not self._is_done and self._handle is None:
            self._handle = register_optimizer_step_post_hook(self._take)

    def end(self) -> None:
        """Stop taking them."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def compared(self) -> None:
        """Note that ranks had the same gradients: stop for good."""
        self._is_done = True
        self.end()
        self.taken = [[] for _ in self.taken]

    def _take(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        current = self._current()
        for index in self._indices:
            parameter = current[index]
            if id(parameter) in stepped:
                self.taken[index] = _fingerprint(parameter.grad)


def _fingerprint(gradient: torch.Tensor | None) -> Fingerprint:
    if gradient is None or gradient.is_sparse or _is_partial(gradient):
        return []
    with torch.no_grad():
        flat = local_value(gradient.detach()).reshape(-1)
        if not flat.numel():
            return []
        norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
        found = [norm, *_signed_sums(flat).tolist()]
    return found if all(map(math.isfinite, found)) else []


def _is_partial(gradient: Any) -> bool:
    """Whether the gradient is the sum of what the ranks have (``SequenceParallel``)."""
    return is_dtensor(gradient) and any(p.is_partial() for p in gradient.placements)


def _signed_sums(flat: torch.Tensor) -> torch.Tensor:
    size = min(_BLOCK, flat.numel())
    signs = torch.randint(
        0, 2, (size, SIGNS), generator=torch.Generator().manual_seed(size), device="cpu"
    )
    signs = signs.to(flat.device, torch.float64).mul_(2).sub_(1)
    sums = flat.new_zeros(SIGNS, dtype=torch.float64)
    for start in range(0, flat.numel(), size * _ROWS):
        piece = flat[start : start + size * _ROWS].double()
        whole = piece.numel() // size * size
        sums += piece[:whole].view(-1, size).sum(0) @ signs
        sums += piece[whole:] @ signs[: piece.numel() - whole]
    return sums


def differ(own: Sequence[float], reference: Sequence[float]) -> float:
    """The norm of the difference of two gradients, estimated from their fingerprints."""
    one, other = (given or [0.0] * (SIGNS + 1) for given in (own, reference))
    squares = [(a - b) ** 2 for a, b in zip(one[1:], other[1:], strict=True)]
    return math.sqrt(sum(squares) / SIGNS)
