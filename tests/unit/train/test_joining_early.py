"""A joining rank builds the group of a planned world before the others have reached it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from kit.assignments import assignment

from elastic.errors import GroupBuildFailed, Superseded
from elastic.groups.replica import ModelReplica
from elastic.groups.world import ReplicaMesh
from elastic.link.link import Assignment, CollectiveFailure, Heartbeat, Message
from elastic.train.current import CurrentStep
from elastic.train.recovery import InProcess
from elastic.train.transfer import Reconfiguration
from elastic.worker.worlds import Worlds

PLANNED = assignment(8, rank=2, size=3, switch_at_step=60)
UNANSWERED = GroupBuildFailed("rank 0 of generation 8 does not answer", missing=(0,))


class Entered(Exception):
    """The group was built."""


class Rank:
    """Each of its builds ends with the next error. The world that follows a failure, or replaces a
    plan, is generation 9."""

    def __init__(self, *errors: Exception, is_restored: bool) -> None:
        self.errors = list(errors)
        self.sent: list[Message] = []
        self.worlds = Worlds(
            abort=lambda: None,
            position=lambda: Heartbeat(generation=0, step=0, phase="other", step_time_s=0.0),
            current_step=lambda: None,
        )
        self.worlds.attach(cast(Any, SimpleNamespace(send=self._send)))
        others = ("job", "progress", "scope", "checkpoints", "timer", "hooks", "journal")
        group = SimpleNamespace(device=torch.device("cpu"), build=self._build, may_be_garbage=False)
        lifecycle = SimpleNamespace(
            replica=ModelReplica(ReplicaMesh()),
            is_restored=is_restored,
            end=lambda *, broken: None,
        )
        session = SimpleNamespace(
            current=CurrentStep(), group=group, lifecycle=lifecycle, **dict.fromkeys(others)
        )
        self.strategy = InProcess(cast(Any, session), self.worlds, cast(Any, None))

    def _send(self, message: Message) -> None:
        self.sent.append(message)
        if isinstance(message, CollectiveFailure):
            self.worlds.receive(assignment(9))

    def _build(self, spec: Assignment, **unused: object) -> None:
        error = self.errors.pop(0)
        if isinstance(error, Superseded):
            self.worlds.receive(assignment(9))
        raise error

    def enter(self, spec: Assignment) -> list[int]:
        """Enter this world, or the one after it. Returns the generations of which this rank has
        reported that they could not be built."""
        self.worlds.receive(spec)
        with pytest.raises(Entered):
            self.strategy.enter_world()
        assert self.errors == []
        return [m.generation for m in self.sent if isinstance(m, CollectiveFailure)]


@pytest.fixture(autouse=True)
def nothing_to_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reconfiguration, "prepare", lambda self: None)


def test_it_waits_for_rank_0_and_reports_nothing() -> None:
    rank = Rank(UNANSWERED, UNANSWERED, UNANSWERED, Entered(), is_restored=False)
    assert rank.enter(PLANNED) == []


def test_it_stops_waiting_when_the_plan_is_replaced() -> None:
    rank = Rank(UNANSWERED, Superseded("generation 8 is over"), Entered(), is_restored=False)
    assert rank.enter(PLANNED) == []


def test_it_reports_peers_that_have_begun_the_world_and_are_not_reached() -> None:
    timed_out = GroupBuildFailed("Connection timed out, remote=[10.0.0.2]:9138")
    rank = Rank(timed_out, Entered(), is_restored=False)
    assert rank.enter(PLANNED) == [8]


def test_a_member_reports_a_rank_0_that_does_not_answer() -> None:
    """It has reached the switch step, and so has every other member."""
    assert Rank(UNANSWERED, Entered(), is_restored=True).enter(PLANNED) == [8]


def test_a_joining_rank_reports_it_in_a_world_that_has_begun() -> None:
    immediate = assignment(8, rank=2, size=3)
    assert Rank(UNANSWERED, Entered(), is_restored=False).enter(immediate) == [8]
