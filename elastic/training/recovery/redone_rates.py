"""Compares the learning rates of a repeated step, to detect a script that miscounts steps.

If a script computes learning rates from a local counter, the counter restarts when ``run.retry``
calls its function again. No error would occur.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from elastic.telemetry.log import get_logger

Rates = dict[str, list[Any]]


def rates_of(optimizers: Mapping[str, torch.optim.Optimizer]) -> Rates:
    """The learning rates of each optimizer, by group."""
    return {name: [g.get("lr") for g in o.param_groups] for name, o in optimizers.items()}


class RedoneRates:
    """Compares learning rates. One per process."""

    def __init__(self) -> None:
        self._expected: Rates = {}  # rates that the script set in the interrupted step
        self._step: int | None = None
        self._has_warned = False

    def interrupted(
        self, step: int, stepped: Collection[str], was: Rates, committed: Rates
    ) -> None:
        """Record the rates at the interruption of a step.

        ``was``: the rates in step number ``step``; ``committed``: the restored rates of the last
        commit; ``stepped``: the optimizers that had finished the step.
        """
        self._step = step
        self._expected = {
            name: rates
            for name, rates in was.items()
            if name not in stepped and rates != committed.get(name)
        }

    def stepping(self, step: int, name: str, optimizer: torch.optim.Optimizer) -> None:
        """Warn once if an optimizer is about to step at a different rate than before."""
        if step != self._step or self._has_warned:
            return
        expected = self._expected.pop(name, None)
        rates = [group.get("lr") for group in optimizer.param_groups]
        if expected is None or rates == expected:
            return
        self._has_warned = True
        get_logger().warning(
            "step %d is repeated with lr=%s for %s (previously lr=%s): a local counter in the "
            "function that run.retry calls was reset. "
            "Keep the count in run.state, or track a scheduler: "
            "run.track(optimizer=optimizer, scheduler=scheduler)",
            step,
            rates[0],
            name,
            expected[0],
        )
