"""Refuses counters of steps that the script increments before it requests the step's batch.

    while run.state["step"] < steps:
        run.state["step"] += 1
        batch = next(batches)

A step is committed when the next batch is requested, so the state of a commit already has the
increment of the step that begins. After a fault the function is called again, increments once more,
and the job trains one step less, without an error. A recovery shows it: a counter that grows by the
same amount in each step is one increment ahead of where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from elastic.errors import TrainingError

_CONFIRMED = 2  # equal increments in a row
Counts = dict[str, list[int]]
"""For each integer of the state: the number of a step that has begun, and its value then."""


@dataclass
class _Counter:
    number: int  # the last step that has begun in this world
    value: int
    grown: tuple[int, int] = (0, 0)  # in the last step: its value, and committed iterations
    confirmed: int = 0  # steps in a row with this growth

    def observe(self, number: int, value: int) -> None:
        grown = value - self.value, number - self.number
        self.confirmed = self.confirmed + 1 if grown == self.grown else 1
        self.number, self.value, self.grown = number, value, grown


@dataclass
class EarlyCounts:
    """Observes the integers in the job's own state. One per process."""

    _world: object = None
    _number: int = -1  # the last step that has begun in this world
    _counters: dict[str, _Counter] = field(default_factory=dict)  # in this world
    _before: Counts = field(default_factory=dict)  # at the last begin of a step before this world
    _rates: dict[str, tuple[int, int]] = field(default_factory=dict)  # in all worlds
    _last: Counts = field(default_factory=dict)  # at the last begin of a step in this process

    def has_observed(self, world: object, number: int) -> bool:
        """Whether :meth:`begins` was called for this step in this world."""
        return self._world is world and self._number == number

    def begins(
        self, world: object, number: int, values: Mapping[str, int], restored: Counts
    ) -> Counts:
        """Called when step ``number`` begins, or has been requested.

        ``restored``: what this returned at the last begin of a step that the job's state includes.
        Raises TrainingError for an early counter.
        """
        if self._world is not world:
            self._world, self._counters, self._before = world, {}, dict(restored)
        self._number = number
        for name, value in values.items():
            counter = self._counters.get(name)
            if counter is None:
                self._counters[name] = _Counter(number, value)
            elif counter.number != number:
                counter.observe(number, value)
                if counter.confirmed >= _CONFIRMED and counter.grown[0] > 0:
                    self._rates[name] = counter.grown
            if self._is_ahead(name, number, value):
                raise _error(name, number)
        self._last = {name: [number, value] for name, value in values.items()}
        return self._last

    def _is_ahead(self, name: str, number: int, value: int) -> bool:
        """Whether a counter is one increment ahead of where it was in earlier worlds."""
        if name not in self._before or name not in self._rates:
            return False
        (before, earlier), (grown, steps) = self._before[name], self._rates[name]
        return (value - earlier - grown) * steps == grown * (number - before)

    def ends(self, world: object, number: int, values: Mapping[str, int], restored: Counts) -> None:
        """Called when the function returns, with ``number`` committed steps. Raises TrainingError
        if step ``number`` had begun before this world, and an early counter has skipped it."""
        if self._world is not world:  # no step has begun in this world
            for name, (begun, earlier) in (*restored.items(), *self._last.items()):
                grown, steps = self._rates.get(name, (1, 1))
                counts_it = earlier * steps == grown * (number + steps)
                if begun == number and values.get(name) == earlier and counts_it:
                    raise _error(name, number)
        self._last = {}


def counts_in(user: Mapping[str, Any], tracked: Mapping[str, Any]) -> dict[str, int]:
    """The integers in ``run.state``, and in the state of tracked objects of the script's classes,
    by the expression that the script has for them."""
    found = {f"run.state[{name!r}]": v for name, v in user.items() if type(v) is int}
    for name, one in tracked.items():
        if _is_of_script(one) and any(type(v) is int for v in vars(one).values()):
            state = one.state_dict()
            if isinstance(state, dict):
                found |= {f"{name}: {k!r}": v for k, v in state.items() if type(v) is int}
    return found


def _is_of_script(one: Any) -> bool:
    of_torch = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    kind = type(one).__module__.partition(".")[0]
    return not isinstance(one, of_torch) and kind != "torch" and hasattr(one, "__dict__")


def _error(name: str, number: int) -> TrainingError:
    return TrainingError(
        f"step {number} is counted in {name} before its batch is requested: the state to which a "
        "recovery returned had counted it, too, so the job would train one step less",
        hint="count a step at its end, not at its beginning: batch = next(batches); …; "
        'optimizer.step(); run.state["step"] += 1',
    )
