"""Warns of buffers that change in every step, in modules that are neither wrapped nor tracked.

DINO's loss has such a buffer, the centre of the teacher's outputs: a joining node begins with
zeros. It is not refused, because a buffer may only be for display, and differ among ranks.
"""

from __future__ import annotations

import torch
from torch import nn

from elastic.telemetry.log import get_logger

_CHANGES = 2  # in a row
_LIBRARIES = frozenset({"torch", "torchvision", "torchmetrics"})  # running means of a frozen model


class UntrackedBuffers:
    """Observes modules that the training function can reach. One per process."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}  # by path
        self._changes: dict[str, int] = {}
        self._has_warned = False

    def observe(self, path: str, one: object) -> None:
        """Called for each module and each step of a search."""
        if self._has_warned or not isinstance(one, nn.Module):
            return
        if type(one).__module__.partition(".")[0] in _LIBRARIES:
            return
        buffers = {n: b for n, b in one.named_buffers(recurse=False) if b.is_floating_point()}
        saved = one.state_dict() if buffers else {}
        for name in buffers.keys() & saved.keys():
            self._observe(path, name, float(buffers[name].detach().sum(dtype=torch.float64)))

    def _observe(self, path: str, name: str, value: float) -> None:
        key = f"{path}.{name}"
        if key in self._values:
            has_changed = value != self._values[key]
            self._changes[key] = self._changes.get(key, 0) + 1 if has_changed else 0
        self._values[key] = value
        if self._changes.get(key, 0) >= _CHANGES:
            self._has_warned = True
            tracked = f"{path.rpartition('.')[2]}={path}"
            get_logger().warning(
                "%s changes in every step, but %s is not tracked: a joining node would restart it, "
                "and a repeated step would change it twice. If it is the same on all ranks, call "
                "run.track(%s) before training",
                key,
                path,
                tracked,
            )
