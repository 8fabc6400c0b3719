"""Random generators of the script that are not part of the job's state."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from elastic.telemetry.log import get_logger
from elastic.train.checks import UntrackedGenerators

STEPS = 6


@pytest.fixture
def warnings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[int], object]], str]:
    """The warnings if the function returns the object that a search finds in each step."""
    monkeypatch.setattr(get_logger(), "propagate", True)

    def run(step: Callable[[int], object]) -> str:
        generators = UntrackedGenerators()
        for number in range(STEPS):
            generators.observe("self.draws", step(number))
        return caplog.text

    return run


def of_torch() -> Callable[[int], object]:
    draws = torch.Generator().manual_seed(0)

    def step(number: int) -> object:
        torch.rand(1, generator=draws)
        return draws

    return step


def of_numpy() -> Callable[[int], object]:
    draws = np.random.default_rng(0)

    def step(number: int) -> object:
        draws.random()
        return draws

    return step


def of_old_numpy() -> Callable[[int], object]:
    draws = np.random.RandomState(0)

    def step(number: int) -> object:
        draws.rand()
        return draws

    return step


def of_python() -> Callable[[int], object]:
    draws = random.Random(0)

    def step(number: int) -> object:
        draws.random()
        return draws

    return step


def seeded_in_each_step() -> Callable[[int], object]:
    draws = torch.Generator()

    def step(number: int) -> object:
        torch.rand(1, generator=draws.manual_seed(number))
        return draws

    return step


def created_in_each_step() -> Callable[[int], object]:
    created = []

    def step(number: int) -> object:
        created.append(random.Random(number))
        return created[-1]

    return step


def used_for_each_epoch() -> Callable[[int], object]:
    draws = torch.Generator().manual_seed(0)

    def step(number: int) -> object:
        if number % 3 == 0:
            torch.randperm(4, generator=draws)
        return draws

    return step


@pytest.mark.parametrize("made", [of_torch, of_numpy, of_old_numpy, of_python])
def test_draws_in_every_step_cause_one_warning(
    warnings: Callable[[Callable[[int], object]], str], made: Callable[[], Callable[[int], object]]
) -> None:
    text = warnings(made())
    assert text.count("self.draws draws random numbers in every step") == 1


@pytest.mark.parametrize("made", [seeded_in_each_step, created_in_each_step, used_for_each_epoch])
def test_generators_that_need_no_state_cause_no_warning(
    warnings: Callable[[Callable[[int], object]], str], made: Callable[[], Callable[[int], object]]
) -> None:
    assert not warnings(made())
