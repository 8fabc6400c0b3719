"""The learning rates of a step that is done again: the same as before, or the script counts wrong.

A script that computes them from a variable of its own begins to count anew, because ``run.retry``
calls its function again. Nothing fails then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from elastic.telemetry.log import get_logger

Rates = dict[str, list[Any]]


def rates_of(optimizers: Mapping[str, torch.optim.Optimizer]) -> Rates:
    """Of each optimizer, by its groups."""
    return {name: [g.get("lr") for g in o.param_groups] for name, o in optimizers.items()}


class RedoneRates:
    """One per process."""

    def __init__(self) -> None:
        self._expected: Rates = {}  # that the script had set in the interrupted step
        self._step: int | None = None
        self._has_warned = False

    def interrupted(
        self, step: int, stepped: Collection[str], was: Rates, committed: Rates
    ) -> None:
        """``was``: the rates when step number ``step`` was interrupted; ``committed``: those of
        the last commit, now put back; ``stepped``: the optimizers that were through with it."""
        self._step = step
        self._expected = {
            name: rates
            for name, rates in was.items()
            if name not in stepped and rates != committed.get(name)
        }

    def stepping(self, step: int, name: str, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: warn, once, if it does so at another rate than before."""
        if step != self._step or self._has_warned:
            return
        expected = self._expected.pop(name, None)
        rates = [group.get("lr") for group in optimizer.param_groups]
        if expected is None or rates == expected:
            return
        self._has_warned = True
        get_logger().warning(
            "step %d is done again with lr=%s for %s, and had lr=%s before: if the script computes "
            "it from a variable of its own, that has begun anew with the function that run.retry "
            "calls. Keep the count in run.state, or track a scheduler: "
            "run.track(optimizer=optimizer, scheduler=scheduler)",
            step,
            rates[0],
            name,
            expected[0],
        )
