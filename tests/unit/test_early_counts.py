"""Counters of steps that are incremented before the step's batch is requested are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from elastic.errors import TrainingError
from elastic.training.misuse.early_counts import Counts, EarlyCounts, counts_in

ONE, OTHER = object(), object()  # worlds
NAME = "run.state['step']"


@dataclass
class Script:
    """A loop over steps of ``length`` iterations each, with its counter in the job's state."""

    is_early: bool
    initial: int = 0
    length: int = 1
    counts: EarlyCounts = field(default_factory=EarlyCounts)
    committed: tuple[int, int, Counts] | None = None  # iterations, the counter's value, counts

    def train(self, world: object, steps: int) -> None:
        """From the last commit; the last step is interrupted, and its iterations with it."""
        number, value, counts = self.committed or (0, self.initial, {})
        for _ in range(steps):
            value += self.is_early
            counts = self.counts.begins(world, number, {NAME: value}, counts)
            self.committed = number, value, counts
            number, value = number + self.length, value + (not self.is_early)

    def end(self, world: object) -> None:
        number, value, counts = self.committed or (0, self.initial, {})
        self.counts.ends(world, number, {NAME: value}, counts)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("before", [1, 2, 6])
def test_an_early_counter_is_refused_after_a_recovery(before: int, length: int) -> None:
    script = Script(is_early=True, length=length)
    script.train(ONE, before)
    with pytest.raises(TrainingError, match=r"is counted in run.state\['step'\] before") as error:
        script.train(OTHER, 3)
    assert error.value.hint is not None
    assert "count a step at its end" in error.value.hint


@pytest.mark.parametrize(("initial", "length"), [(0, 1), (1, 1), (0, 4)])
@pytest.mark.parametrize("before", [1, 2, 6])
def test_a_counter_at_the_end_of_steps_is_not(before: int, initial: int, length: int) -> None:
    script = Script(is_early=False, initial=initial, length=length)
    for world in (ONE, OTHER, object()):
        script.train(world, before)
    if initial == 0:
        script.end(object())


def test_a_joining_process_refuses_it_once_it_knows_the_increment() -> None:
    survivor = Script(is_early=True)
    survivor.train(ONE, 5)
    joining = Script(is_early=True, committed=survivor.committed)
    with pytest.raises(TrainingError, match="before its batch is requested"):
        joining.train(OTHER, 3)


@pytest.mark.parametrize(("length", "before"), [(1, 1), (1, 6), (4, 6)])
def test_a_last_step_that_is_not_repeated_is_refused(length: int, before: int) -> None:
    script = Script(is_early=True, length=length)
    script.train(ONE, before)
    if length > 1:
        script.counts._rates[NAME] = 1, length
    with pytest.raises(TrainingError, match="train one step less"):
        script.end(OTHER)


def test_other_integers_may_change_in_each_world() -> None:
    counts = EarlyCounts()
    restored: Counts = {}
    for restarts, world in enumerate((ONE, OTHER, object())):
        for number in range(5):
            values = {"restarts": restarts, "bad_epochs": number // 3, "tokens": number**2}
            restored = counts.begins(world, number, values, restored)


class Trainer:
    """A script's own, with a counter."""

    def __init__(self) -> None:
        self.step, self.width = 3, 8

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "loss": 0.5}


def items() -> Iterator[tuple[str, object]]:
    model = nn.Linear(1, 1)
    yield "optimizer", torch.optim.SGD(model.parameters())
    yield "model", model
    yield "trainer", Trainer()


def test_integers_of_the_state_and_of_the_scripts_own_objects_are_found() -> None:
    user: Mapping[str, Any] = {"step": 7, "best": 0.5, "is_done": True}
    assert counts_in(user, dict(items())) == {"run.state['step']": 7, "trainer: 'step'": 3}
