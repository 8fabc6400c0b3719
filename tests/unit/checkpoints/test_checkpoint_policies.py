"""Save policies and retention policies."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit.checkpoint_states import small_state

import checkpoints
from checkpoints import (
    Automatic,
    BestN,
    Continuous,
    EveryNSeconds,
    EveryNSteps,
    EverySeconds,
    EverySteps,
    LatestN,
    OnPreemption,
    SaveContext,
)
from checkpoints.policies import RetentionFunction, optimal_interval_s
from checkpoints.testing import MemoryStorage

NOW = SaveContext(step=10, now_s=1000.0, began_s=0.0, saved_step=5, saved_s=900.0)


def test_save_policies_decide_by_the_save_context() -> None:
    assert EverySteps(5)(NOW) and not EverySteps(3)(NOW)
    assert EverySeconds(100)(NOW) and not EverySeconds(101)(NOW)
    assert Continuous()(NOW) and not Continuous()(replace(NOW, in_flight=1))
    assert OnPreemption()(replace(NOW, preempted=True)) and not OnPreemption()(NOW)


@pytest.mark.parametrize("when", [EverySteps(5), EverySeconds(1), Continuous(), OnPreemption()])
def test_no_step_is_saved_twice(when: checkpoints.SavePolicy) -> None:
    assert not when(replace(NOW, saved_step=10, preempted=True))


def test_or_combines_policies_and_their_need_for_agreement() -> None:
    both = EverySteps(3) | EverySeconds(200)
    assert not both(NOW)
    assert both(replace(NOW, now_s=1100.0)) and both(replace(NOW, step=12))
    assert both.needs_agreement
    assert not (EverySteps(3) | EverySteps(5)).needs_agreement


def test_the_optimal_interval_minimizes_the_expected_loss() -> None:
    # Daly's model of total time with exponential failures, without restart cost.
    def loss(interval_s: float, cost_s: float, mtbf_s: float) -> float:
        return float(torch.tensor((interval_s + cost_s) / mtbf_s).expm1()) * mtbf_s / interval_s

    for cost_s, mtbf_s in ((1.0, 600.0), (20.0, 3600.0), (0.1, 60.0)):
        best = optimal_interval_s(cost_s, mtbf_s)
        assert loss(best, cost_s, mtbf_s) <= 1.0005 * min(
            loss(best * factor, cost_s, mtbf_s) for factor in (0.5, 0.7, 0.9, 1.1, 1.5, 2.0)
        )


def test_automatic_saves_more_often_with_more_failures_or_cheaper_saves() -> None:
    when = Automatic(expected_between_failures_s=1e4, min_interval_s=1, max_interval_s=1e5)
    calm = replace(NOW, save_cost_s=4.0)
    assert when.interval_s(replace(calm, failures=9)) < when.interval_s(calm)
    assert when.interval_s(replace(calm, save_cost_s=1.0)) < when.interval_s(calm)
    assert when.interval_s(NOW) == 1  # nothing measured yet: soon
    due = replace(calm, saved_s=calm.now_s - when.interval_s(calm))
    assert when(due) and not when(calm) and not when(replace(due, in_flight=1))


def kept_after(keep: RetentionFunction, *saves: tuple[int, Any, float]) -> list[int]:
    storage = MemoryStorage()
    for step, loss, time_s in saves:
        state = {**small_state(step), "run": {"loss": loss}}
        clock = functools.partial(float, time_s)
        checkpoints.save(storage, state, step=step, nonce="aa", keep=keep, clock=clock)
    return sorted(info.step for info in checkpoints.list_checkpoints(storage))


SAVES = [(s, abs(s - 30) / 10, s * 6.0) for s in (10, 20, 30, 40, 50, 60)]


def test_retention_policies_keep_the_expected_steps() -> None:
    assert kept_after(LatestN(2), *SAVES) == [50, 60]
    assert kept_after(EveryNSteps(20), *SAVES) == [20, 40, 60]
    assert kept_after(EveryNSeconds(120), *SAVES) == [10, 20, 40, 60]
    assert kept_after(BestN(2, "run/loss"), *SAVES) == [30, 40, 60]  # the newest of equals
    assert kept_after(BestN(1, "run/loss", largest=True), *SAVES) == [60]
    assert kept_after(LatestN(1) | EveryNSteps(30) | BestN(1, "run/loss"), *SAVES) == [30, 60]


def test_the_newest_is_always_kept_and_nan_ranks_last() -> None:
    nan = float("nan")
    assert kept_after(BestN(1, "run/loss"), (1, 0.5, 0), (2, nan, 0), (3, nan, 0)) == [1, 3]
    assert kept_after(BestN(1, "no/such"), *SAVES) == [60]
    assert kept_after(EveryNSteps(61), *SAVES) == [60]


@pytest.mark.parametrize(
    "make",
    [
        lambda: EverySteps(0),
        lambda: EverySeconds(float("nan")),
        lambda: Automatic(min_interval_s=10, max_interval_s=1),
        lambda: LatestN(0),
        lambda: EveryNSteps(0),
        lambda: EveryNSeconds(-1),
        lambda: BestN(0, "loss"),
    ],
)
def test_invalid_policies_are_rejected(make: Any) -> None:
    with pytest.raises(checkpoints.ArgumentError):
        make()


@pytest.mark.parametrize(
    "keep",
    [
        lambda names: [name.step for name in names[:2]],
        lambda names: [str(name) for name in names[:2]],
        lambda names: [(name,) for name in names[:2]],
    ],
    ids=["steps", "texts", "tuples"],
)
def test_a_policy_that_returns_anything_but_names_removes_nothing(keep: Any) -> None:
    """It would otherwise keep none of them."""
    storage = MemoryStorage()
    for step in (1, 2, 3):
        checkpoints.save(storage, small_state(step), step=step, nonce="aa", keep=None)
    with checkpoints.Engine(storage, keep=keep) as engine:
        world = checkpoints.WriterGroup(nonce="aa")
        outcome = engine.save_async(small_state(4), step=4, world=world).wait(60)
    assert outcome is not None and outcome.status is checkpoints.SaveStatus.COMMITTED
    assert "which is no CheckpointName" in outcome.notes[0]
    with pytest.raises(checkpoints.ArgumentError, match="no CheckpointName"):
        checkpoints.prune(storage, keep)
    assert [info.step for info in checkpoints.list_checkpoints(storage)] == [4, 3, 2, 1]


def test_a_policy_may_change_the_list_that_it_is_given() -> None:
    def oldest(names: Any) -> list[checkpoints.CheckpointName]:
        names.sort(key=lambda name: name.step)
        return [names.pop(0)]

    storage = MemoryStorage()
    for step in (1, 2, 3):
        checkpoints.save(storage, small_state(step), step=step, nonce="aa", keep=None)
    assert checkpoints.prune(storage, oldest) == ("step-000000002.g0.aa",)
    assert [info.step for info in checkpoints.list_checkpoints(storage)] == [3, 1]


def test_names_that_a_policy_was_not_given_count_for_nothing() -> None:
    """One that pins a checkpoint goes on to return its name when it is damaged, or removed."""
    pinned = checkpoints.CheckpointName(9, 0, "aa")
    storage = MemoryStorage()
    for step in (1, 2, 3):
        checkpoints.save(
            storage,
            small_state(step),
            step=step,
            nonce="aa",
            keep=lambda names: {pinned, *names[:2]},
        )
    assert [info.step for info in checkpoints.list_checkpoints(storage)] == [3, 2]
