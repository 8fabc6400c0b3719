"""The ranks of a replica settle at the end of a backward pass whether they leave their world."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from elastic.errors import WorldChanged
from elastic.link.protocol import Heartbeat, WorldMessage
from elastic.mesh import ModelReplica
from elastic.messages.world import Cause, RankAssignment, WorldSpec, WorldState
from elastic.training.current_step import CurrentStep
from elastic.training.recovery.in_process import InProcess
from elastic.training.step import Step
from elastic.worker.worlds import Worlds
from elastic.world.mesh import ReplicaMesh


def message(generation: int, *, switch_at_step: int | None = None) -> WorldMessage:
    return WorldMessage(
        world=WorldSpec(
            generation=generation,
            nonce="ab",
            lineage=(),
            store_host="",
            store_port=0,
            switch_at_step=switch_at_step,
            state=WorldState.ACTIVE,
            cause=Cause.FIRST,
            reason="",
            committed_step=None,
        ),
        assignment=RankAssignment(rank=0, size=2, local_rank=0, local_size=2),
        node_rank=0,
        nodes=1,
        store_key="",
    )


class Rank:
    """One of a replica of two, in generation 1 and in its step 4."""

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
            cast(Any, SimpleNamespace(job=None, current=self.current, progress=None)),
            self.worlds,
            cast(Any, SimpleNamespace(device=torch.device("cpu"))),
            cast(Any, SimpleNamespace(replica=self.replica)),
            cast(Any, None),
            cast(Any, None),
            cast(Any, SimpleNamespace(observers=None, journal=None)),
        )
        monkeypatch.setattr(dist, "all_reduce", self._all_reduce)
        self.worlds.receive(message(1))
        self.worlds.next()
        self.worlds.entered(4)
        self.current.begin(Step.past(4, 0, 4, 1), None)

    def aborts(self) -> int:
        """How often the link's thread has aborted the group of the world."""
        return self._aborts

    def _abort(self) -> None:
        self._aborts += 1

    def _all_reduce(self, total: torch.Tensor) -> None:
        """With the other rank, which says the same to every question."""
        self.collectives += 1
        if self.other_leaves:
            total[1 if len(total) > 1 else 0] += 1.0

    def end_backward(self) -> None:
        self.replica.sum_and_ask([0.0])

    def leaves(self, *, accumulates: bool = False) -> bool:
        """At the begin of step 5."""
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
def test_a_world_known_by_then_is_entered_without_another_collective(
    rank: Rank, switch: int | None, leaves: bool
) -> None:
    rank.worlds.receive(message(2, switch_at_step=switch))
    rank.end_backward()
    assert rank.leaves() == leaves
    assert rank.collectives == 1


def test_what_the_other_rank_knows_counts(rank: Rank) -> None:
    rank.other_leaves = True
    rank.end_backward()
    assert rank.leaves()


def test_of_a_world_known_later_the_next_step_has_begun(rank: Rank) -> None:
    """Nobody of the replica leaves, and those who have wait for nobody: the group is aborted."""
    rank.end_backward()
    assert not rank.aborts()
    rank.worlds.receive(message(2, switch_at_step=5))
    assert rank.aborts() == 1
    assert not rank.leaves()


def test_a_later_step_can_still_be_the_first_one_elsewhere(rank: Rank) -> None:
    rank.end_backward()
    rank.worlds.receive(message(2, switch_at_step=6))
    assert not rank.leaves()
    assert not rank.aborts()


def test_ranks_ask_again_after_any_other_collective(rank: Rank) -> None:
    """One that has left by itself waits for the others there."""
    rank.end_backward()
    rank.replica.any(False)
    rank.other_leaves = True
    assert rank.leaves()
    assert rank.collectives == 3


def test_a_step_without_a_backward_pass_before_it_is_settled_at_its_begin(rank: Rank) -> None:
    rank.worlds.receive(message(2, switch_at_step=5))
    assert rank.leaves()
    assert rank.collectives == 1


@pytest.mark.parametrize(("switch", "leaves"), [(None, True), (5, False)])
def test_within_an_accumulation_only_a_world_that_is_over_is_left(
    rank: Rank, switch: int | None, leaves: bool
) -> None:
    rank.worlds.receive(message(2, switch_at_step=switch))
    rank.end_backward()
    assert rank.leaves(accumulates=True) == leaves


def test_answers_are_of_no_use_for_another_step(rank: Rank) -> None:
    """The loop was left in step 4, which begins again."""
    rank.end_backward()
    rank.current.drop()
    rank.current.begin(Step.past(4, 0, 4, 1), None)
    assert rank.current.first_number == 4
    rank.strategy.before_step(Step.past(4, 0, 4, 1))
    assert rank.collectives == 2
