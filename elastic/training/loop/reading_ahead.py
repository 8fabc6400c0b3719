"""Detects a script that requests a batch before it has trained on the previous one (prefetching).

A step ends when the script requests the next batch. A script that reads ahead trains on the
previous step's batch, so a fault loses or repeats a batch, and its last update comes after the
loop. The first steps of a process reveal it: nothing is trained in the first step, and the forward
pass in the second step gets the first step's tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from elastic.errors import TrainingError
from elastic.telemetry.log import get_logger

HINT = (
    "iterate over the loader itself: DataLoader(num_workers=4, pin_memory=True) reads ahead, and\n"
    "for inputs, targets in loader:\n"
    "    inputs = inputs.to(run.device, non_blocking=True)"
)


class _Stage(Enum):
    FIRST_STEP = "first step"
    SECOND_STEP = "second step"  # nothing was trained in the first
    OVER = "over"


class ReadingAhead:
    """Checks the first two steps of a process."""

    def __init__(self) -> None:
        self._stage = _Stage.FIRST_STEP
        self._first_batch: list[weakref.ref[torch.Tensor]] = []
        self._hooks: list[RemovableHandle] = []

    def step_began(self, batch: Any) -> None:
        """Called with the batch of a step that begins."""
        if self._stage is _Stage.FIRST_STEP:
            self._first_batch = [weakref.ref(tensor) for tensor in _tensors(batch)]

    def step_ended(self, number: int, modules: Collection[nn.Module], *, trained: bool) -> None:
        """Called when the script requests the batch after step ``number``."""
        if self._stage is _Stage.FIRST_STEP and modules and not trained:
            get_logger().warning(
                "step %d ended without a forward pass of a wrapped model. If the script reads "
                "batches ahead (a prefetcher), it trains on the previous step's batch, and its "
                "last update comes after the loop, where it is refused: %s",
                number,
                HINT,
            )
            self._stage = _Stage.SECOND_STEP
            self._hooks = [
                module.register_forward_pre_hook(self._check, with_kwargs=True)
                for module in modules
            ]
        elif self._stage is not _Stage.OVER:
            self._stage = _Stage.OVER
            self._first_batch.clear()
            for hook in self._hooks:
                hook.remove()

    def _check(self, module: nn.Module, inputs: Any, named: Any) -> None:
        first = [ref() for ref in self._first_batch]
        if any(tensor is one for tensor in _tensors([inputs, named]) for one in first):
            raise TrainingError(
                "the script requests the next batch before it trains on the last one, as a "
                "prefetcher does: a fault would lose or repeat a batch",
                hint=HINT,
            )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
