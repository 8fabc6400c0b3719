"""Weights gradients for uneven shares, because FSDP takes the mean over ranks.

A rank with n of a step's N samples has the gradient of the mean over its n samples. FSDP's mean
over W ranks is correct if each gradient is multiplied by W·n/N first: the result is the gradient of
the mean over all N samples. Every gradient passes through the reduce-scatter exactly once, whatever
the script has computed it from, so the factor is applied there. Equal shares need none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from elastic import torch_fsdp
from elastic.errors import TrainingError

_NEARLY = 1e-12


class ShareWeight:
    """The factor of a module's gradients in the current step. ``parts``: those that
    ``fully_shard`` was applied to."""

    def __init__(self, parts: Iterable[Any]) -> None:
        self._factor = 1.0
        self._parts = list(parts)
        for part in self._parts:
            torch_fsdp.fsdp_wrap_reduce_scatters(part, self._weighted)

    def _weighted(self, of_torch: Any) -> WeightedReduceScatter:
        return WeightedReduceScatter(of_torch, self.weigh)

    def begin(self, factor: float) -> None:
        """Begin a step; ``factor`` is 1 if all ranks have the same number of samples.

        Gradients of earlier steps that are reduced with those of this one are multiplied by the
        ratio of their factor to this one. Raises TrainingError if this one is 0.
        """
        factor = 1.0 if abs(factor - 1.0) <= _NEARLY else factor
        before, self._factor = self._factor, factor
        if factor == before:
            return
        held = [g for part in self._parts for g in torch_fsdp.fsdp_held_gradients(part)]
        if not held:
            return
        if factor == 0.0:
            raise TrainingError(
                "this rank has no samples in this step, but gradients of earlier ones, accumulated "
                "under set_requires_gradient_sync(False)",
                hint="use DataLoader(…, drop_last=True), and a global_batch of at least one sample "
                "per rank",
            )
        for gradient in held:
            _weigh(gradient, before / factor)

    def weigh(self, gradients: torch.Tensor) -> None:
        """Multiply gradients by the factor, in place."""
        _weigh(gradients, self._factor)


def _weigh(gradients: torch.Tensor, factor: float) -> None:
    if factor == 0.0:
        gradients.zero_()  # × 0 would keep a NaN of the filler sample
    elif factor != 1.0:
        gradients.mul_(factor)


class WeightedReduceScatter:
    """A reduce-scatter of FSDP (``FSDPModule.set_custom_reduce_scatter``) that weighs its input."""

    def __init__(self, reduce_scatter: Any, weigh: Callable[[torch.Tensor], None]) -> None:
        self._reduce_scatter = reduce_scatter
        self._weigh = weigh

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for an input or an output."""
        memory: torch.Tensor = self._reduce_scatter.allocate(size, dtype=dtype, device=device)
        return memory

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._weigh(input_tensor)
        work: dist.Work | None = self._reduce_scatter(
            output_tensor=output_tensor,
            input_tensor=input_tensor,
            group=group,
            op=op,
            async_op=async_op,
        )
        return work
