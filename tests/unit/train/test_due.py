"""When a job saves: by the step on each rank, by time on rank 0 for all ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit.manual_clock import ManualClock

from checkpoints import Automatic, Continuous, EverySeconds, EverySteps, OnPreemption, SavePolicy
from elastic.groups.world import world_from_environment
from elastic.telemetry.events import Event
from elastic.train.checkpointing import CheckpointManager, Due
from elastic.train.folder import Checkpoints
from elastic.train.order import COUNT, StepFlags
from elastic.train.state import JobState


def due(when: SavePolicy, clock: ManualClock, *, rank: int = 0, size: int = 3) -> Due:
    result = Due(when, clock)
    result.enter(rank=rank, size=size)
    return result


def test_step_policies_need_no_agreement() -> None:
    policy = due(EverySteps(5), ManualClock())
    assert policy.is_due(10, 5, None) and policy.is_due(10, 5, StepFlags())
    assert not policy.is_due(11, 10, None) and not policy.is_due(10, 10, None)
    assert not policy.needs_agreement and not policy.wants(10, 5, 0)


def test_time_policies_follow_rank_0_and_reach_all_in_one_step() -> None:
    clock = ManualClock()
    policies = [due(EverySteps(100) | EverySeconds(10), clock, rank=rank) for rank in range(3)]
    clock.advance(10)
    assert [p.wants(8, 0, 0) for p in policies] == [True, False, False]
    assert not any(p.is_due(7, 0, StepFlags()) for p in policies)
    assert all(p.is_due(8, 0, StepFlags(save=True)) for p in policies)
    for policy in policies:
        policy.saved()
    assert not policies[0].wants(9, 8, 0)
    assert all(p.is_due(100, 8, StepFlags()) for p in policies), "the step alone decides"


def test_a_single_rank_needs_no_agreement() -> None:
    clock = ManualClock()
    policy = due(EverySeconds(10), clock, size=1)
    assert not policy.needs_agreement and not policy.is_due(5, 0, None)
    clock.advance(10)
    assert policy.is_due(5, 0, None)


def test_continuous_waits_for_a_save_in_flight() -> None:
    policy = due(Continuous(), ManualClock())
    assert policy.wants(2, 1, 0) and not policy.wants(2, 1, 1)


def test_all_ranks_save_when_a_node_leaves() -> None:
    policy = due(OnPreemption(), ManualClock(), rank=2)
    assert not policy.is_due(3, 0, StepFlags()) and policy.is_due(4, 0, StepFlags(leaving=True))
    assert not policy.is_due(5, 4, StepFlags(leaving=True)), "once is enough"
    assert not policy.needs_agreement
    policy.enter(rank=2, size=2)
    assert policy.is_due(6, 4, StepFlags(leaving=True)), "another one"


def test_a_late_notice_saves_at_the_boundary_at_which_nodes_leave() -> None:
    policy = due(OnPreemption() | EverySeconds(10), ManualClock(), rank=2)
    assert not policy.is_due(4, 0, StepFlags())
    assert policy.is_due_before_leaving(4, 0, 0) and not policy.is_due_before_leaving(4, 4, 0)
    assert policy.is_due(5, 0, StepFlags(leaving=True))
    assert not policy.is_due_before_leaving(6, 5, 0), "saved on the notice"
    assert not due(EverySteps(10), ManualClock()).is_due_before_leaving(4, 0, 0)
    assert not due(Continuous(), ManualClock()).is_due_before_leaving(4, 0, 0)


@pytest.mark.parametrize("when", [EverySteps(1), EverySteps(1) | Continuous()])
def test_no_rank_saves_while_one_cannot(when: SavePolicy) -> None:
    assert not due(when, ManualClock()).is_due(4, 0, StepFlags(save=True, stuck=True))


def test_the_automatic_interval_depends_on_costs_and_failures() -> None:
    def interval_s(cost_s: float, failures: int) -> float:
        clock = ManualClock()
        policy = due(Automatic(min_interval_s=1.0), clock)
        policy.measured(cost_s)
        policy.observed(3600.0, failures)
        for _ in range(3600):
            if policy.wants(2, 1, 0):
                return clock.monotonic()
            clock.advance(1.0)
        raise AssertionError("never")

    assert interval_s(0.1, 0) < interval_s(1.0, 0) < interval_s(10.0, 0)
    assert interval_s(1.0, 30) < interval_s(1.0, 3) < interval_s(1.0, 0)


def test_flags_not_carried_by_gradients_are_agreed_within_the_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a boundary involves no collective."""
    votes: list[int] = []
    monkeypatch.setattr("elastic.train.checkpointing.ask", lambda flags: flags)

    @contextmanager
    def together() -> Iterator[None]:
        votes.append(1)
        yield

    manager = CheckpointManager(Checkpoints(tmp_path, when=EverySeconds(1000)), Silent())
    job = JobState(seed=0)
    manager.begin_world(replace(world_from_environment({}), size=2), job)
    try:
        manager.at_boundary(job, together)  # before the first step
        assert not votes
        manager.step_ended()
        assert manager.at_boundary(job, together) == StepFlags() and len(votes) == 1
        manager.flags.write(torch.zeros(COUNT))
        manager.step_ended()
        assert manager.at_boundary(job, together) == StepFlags() and len(votes) == 1
    finally:
        manager.close(0.0)


class Silent:
    """A journal that discards events."""

    def emit(self, event: Event, *, level: int = logging.INFO) -> None:
        pass
