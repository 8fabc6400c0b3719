"""Learning rates that follow a count from enumerate(loader) are refused; others are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from elastic.errors import TrainingError
from elastic.train.reading import CountedRates


class Schedule:
    """A script's own, with a count in its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def run_steps(rates: CountedRates, sgd: torch.optim.Optimizer, changed: list[bool]) -> None:
    for number, is_changed in enumerate(changed):
        rates.step_began()
        if is_changed:
            sgd.param_groups[0]["lr"] *= 0.9
        rates.step_ended(number)
        sgd.param_groups[0]["lr"] *= 1.01  # a callback, after the script's code


def test_a_rate_that_changes_in_each_step_is_refused() -> None:
    sgd = optimizer()
    with pytest.raises(TrainingError, match="step 2: the learning rate changes in every step") as e:
        run_steps(CountedRates({"sgd": sgd}, {"best": 0.5}), sgd, [True] * 9)
    assert e.value.hint == "for i, batch in enumerate(loader, start=loader.index):"


@pytest.mark.parametrize(
    ("others", "user"), [({"schedule": Schedule()}, {}), ({}, {"iteration": 3})]
)
def test_a_script_with_a_count_of_its_own_is_not(
    others: dict[str, Any], user: dict[str, Any]
) -> None:
    sgd = optimizer()
    run_steps(CountedRates({"sgd": sgd, **others}, user), sgd, [True] * 9)


def test_a_count_in_the_state_may_begin_in_the_first_step() -> None:
    sgd, user = optimizer(), dict[str, Any]()
    scheduler = CosineAnnealingWarmRestarts(sgd, T_0=1)
    rates = CountedRates({"sgd": sgd, "scheduler": scheduler}, user)
    for number in range(5):
        rates.step_began()
        user["iteration"] = user.get("iteration", 0) + 1
        scheduler.step(user["iteration"] / 3)
        rates.step_ended(number)


def test_reactions_to_the_loss_are_not() -> None:
    sgd = optimizer()
    run_steps(CountedRates({"sgd": sgd}, {}), sgd, [False, True, True, False, True, False] * 3)
