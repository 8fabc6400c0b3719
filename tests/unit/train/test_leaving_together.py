"""The ranks of a replica agree at the end of a backward pass whether they leave their world."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from kit.assignments import assignment

from elastic.errors import WorldChanged
from elastic.groups.replica import ModelReplica
from elastic.groups.world import ReplicaMesh
from elastic.link.link import Heartbeat
from elastic.train.current import CurrentStep
from elastic.train.recovery import InProcess
from elastic.train.step import Step
from elastic.worker.worlds import Worlds


class Rank:
    """A rank of a replica of two, in generation 1 and in step 4."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._aborts = self.collectives = 0
        self.other_leaves = False
        self.replica = ModelReplica(ReplicaMesh.parse({"shard": 2}))
        self.current = CurrentStep()
        self.worlds = Worlds(
            abort=self._abort,
            position=lambda: Heartbeat(generation=1, step=4, phase="other", step_time_s=0.0),
            current_step=lambda: self.current.first_number,
        )
        self.strategy = InProcess(
            cast(Any, self._session()),
            self.worlds,
            cast(Any, None),
        )
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)
        self.worlds.receive(assignment(1))
        self.worlds.next()
        self.worlds.entered(4)
        self.current.begin(Step.past(4, 0, 4, 1), None)

    def _session(self) -> SimpleNamespace:
        others = ("job", "progress", "scope", "checkpoints", "hooks", "journal", "timer")
        return SimpleNamespace(
            current=self.current,
            group=SimpleNamespace(device=torch.device("cpu")),
            lifecycle=SimpleNamespace(replica=self.replica),
            **dict.fromkeys(others),
        )

    def aborts(self) -> int:
        """How often the link's thread has aborted the group of the world."""
        return self._aborts

    def _abort(self) -> None:
        self._aborts += 1

    def _all_reduce(self, total: torch.Tensor) -> None:
        """With the other rank, which answers the same."""
        self.collectives += 1
        if self.other_leaves:
            total[1 if len(total) > 1 else 0] += 1.0

    def end_backward(self) -> None:
        self.replica.sum_and_ask([0.0])

    def leaves(self, *, accumulates: bool = False) -> bool:
        """Whether the rank leaves before step 5."""
        last = self.current.step
        self.current.drop()
        if accumulates and last is not None:
            self.current.accumulation.add(last)
        step = Step.past(5, 0, 5, 1)
        self.current.begin(step, None)
        try:
            self.strategy.before_step(step)
        except WorldChanged:
            return True
        return False


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


@pytest.mark.parametrize(("switch", "leaves"), [(None, True), (5, True), (6, False)])
def test_a_known_world_is_entered_without_another_collective(
    rank: Rank, switch: int | None, leaves: bool
) -> None:
    rank.worlds.receive(assignment(2, switch_at_step=switch))
    rank.end_backward()
    assert rank.leaves() == leaves
    assert rank.collectives == 1


def test_a_world_known_to_the_other_rank_counts(rank: Rank) -> None:
    rank.other_leaves = True
    rank.end_backward()
    assert rank.leaves()


def test_a_world_received_after_the_backward_pass_aborts_the_group(rank: Rank) -> None:
    """The replica does not leave; ranks that have left do not wait, since the group is aborted."""
    rank.end_backward()
    assert not rank.aborts()
    rank.worlds.receive(assignment(2, switch_at_step=5))
    assert rank.aborts() == 1
    assert not rank.leaves()


def test_a_switch_at_a_later_step_is_still_possible(rank: Rank) -> None:
    rank.end_backward()
    rank.worlds.receive(assignment(2, switch_at_step=6))
    assert not rank.leaves()
    assert not rank.aborts()


def test_ranks_agree_again_after_any_other_collective(rank: Rank) -> None:
    """A rank that has left alone waits there for the others."""
    rank.end_backward()
    rank.replica.any(False)
    rank.other_leaves = True
    assert rank.leaves()
    assert rank.collectives == 3


def test_a_step_without_a_previous_backward_pass_is_agreed_at_its_begin(rank: Rank) -> None:
    rank.worlds.receive(assignment(2, switch_at_step=5))
    assert rank.leaves()
    assert rank.collectives == 1


@pytest.mark.parametrize(("switch", "leaves"), [(None, True), (5, False)])
def test_gradient_accumulation_defers_planned_switches_only(
    rank: Rank, switch: int | None, leaves: bool
) -> None:
    rank.worlds.receive(assignment(2, switch_at_step=switch))
    rank.end_backward()
    assert rank.leaves(accumulates=True) == leaves


def test_an_answer_is_not_reused_for_another_step(rank: Rank) -> None:
    """The loop was left in step 4, which is repeated."""
    rank.end_backward()
    rank.current.drop()
    rank.current.begin(Step.past(4, 0, 4, 1), None)
    assert rank.current.first_number == 4
    rank.strategy.before_step(Step.past(4, 0, 4, 1))
    assert rank.collectives == 2
