"""Weights gradients for uneven shares, because FSDP takes the mean over ranks.

A rank with n of a step's N samples has the gradient of the mean over its n samples. FSDP's mean
over W ranks is correct if each gradient is multiplied by W·n/N first: the result is the gradient of
the mean over all N samples. The factor is applied once, to the gradient of the module's output.
Equal shares need none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from elastic.compiling import not_compiled
from elastic.errors import TrainingError

_NEARLY = 1e-12


class ShareWeight:
    """The factor of one module's gradients in the current step."""

    def __init__(self, module: nn.Module) -> None:
        self._factor = 1.0
        self._handles = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after),
        ]

    def begin(self, factor: float) -> None:
        """Begin a step; ``factor`` is 1 if all ranks have the same number of samples."""
        self._factor = 1.0 if abs(factor - 1.0) <= _NEARLY else factor

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    @not_compiled
    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._factor == 1.0 or not torch.is_grad_enabled():
            return
        if any(leaf.requires_grad for leaf in _tensors_in((args, kwargs))):
            raise TrainingError(
                "ranks have different numbers of samples in this step, and the input of the model "
                "that run.build() returned requires a gradient: it is the output of this or "
                "another model, and its gradient would be weighted twice",
                hint="use equal shares: a global_batch that is a multiple of every world size, and "
                "drop_last=True; or build one module that contains both models",
            )

    @not_compiled
    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._factor == 1.0 or not torch.is_grad_enabled():
            return
        factor = self._factor
        trained = [leaf for leaf in _tensors_in(output) if leaf.requires_grad]
        if not trained and _is_trained(module):
            raise TrainingError(
                "ranks have different numbers of samples in this step, and the output of the model "
                f"that run.build() returned is a {type(output).__name__} without a tensor that "
                "requires a gradient: it cannot be weighted",
                hint="return tensors, or tuples, lists, dicts or dataclasses of them, from forward",
            )
        for leaf in trained:
            leaf.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: _weighted(gradient, factor)
            )


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, field.name))


def _is_trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _weighted(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    # On a rank without samples, × 0 would keep a NaN of the filler sample.
    return torch.zeros_like(gradient) if factor == 0.0 else gradient * factor
