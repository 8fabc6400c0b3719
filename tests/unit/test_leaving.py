"""SIGTERM to an agent: what it does depends on what the main thread does."""

from __future__ import annotations

import signal

import pytest

from elastic.agent.ending.leaving import LauncherPhase, Leaving
from elastic.testing.doubles.manual_clock import ManualClock

GRACE_S = 20.0


class Node:
    """A node's service as far as leaving goes."""

    def __init__(self, *, in_order: bool) -> None:
        self.can_leave_gracefully = in_order
        self.has_left = False
        self.said: list[str] = []

    def leave(self, reason: str) -> None:
        self.said.append(f"leave: {reason}")

    def expect_end_of_workers(self) -> None:
        self.said.append("workers end")


class Told:
    """A node, its handler and its time."""

    def __init__(self, phase: LauncherPhase, *, in_order: bool = True) -> None:
        self.node = Node(in_order=in_order)
        self.clock = ManualClock()
        self.leaving = Leaving(
            self.node,
            GRACE_S,
            lambda: self.node.said.append("killed"),
            self.clock,
            claim_signal=lambda name: None,
        )
        self.leaving.phase = phase

    def sigterm(self) -> int | None:
        """The exit code that it ends with at once, if it does."""
        try:
            self.leaving(signal.SIGTERM, None)
        except SystemExit as end:
            assert isinstance(end.code, int)
            return end.code
        return None

    def poll(self) -> int | None:
        try:
            self.leaving.end_if_left()
        except SystemExit as end:
            assert isinstance(end.code, int)
            return end.code
        return None


def test_workers_that_can_leave_in_order_are_waited_for() -> None:
    told = Told(LauncherPhase.RUNNING)
    assert told.sigterm() is None
    assert told.node.said == ["leave: SIGTERM"]
    told.clock.advance(GRACE_S - 1)
    assert told.poll() is None
    told.node.has_left = True
    assert told.poll() == 75
    assert "killed" not in told.node.said


def test_workers_whose_time_is_up_are_killed() -> None:
    told = Told(LauncherPhase.RUNNING)
    told.sigterm()
    told.clock.advance(GRACE_S + 0.1)
    assert told.poll() == 75
    # In this order: a worker that dies while it is expected to is no failure.
    assert told.node.said[:3] == ["leave: SIGTERM", "workers end", "killed"]


@pytest.mark.parametrize("phase", [LauncherPhase.WAITING, LauncherPhase.RUNNING])
def test_without_an_order_to_keep_the_node_ends_at_once(phase: LauncherPhase) -> None:
    told = Told(phase, in_order=False)
    assert told.sigterm() == 75
    assert told.node.said == ["leave: SIGTERM", "workers end"]


def test_the_start_of_workers_is_not_interrupted_and_then_they_leave_in_order() -> None:
    told = Told(LauncherPhase.STARTING)
    assert told.sigterm() is None
    assert told.node.said == []
    told.leaving.phase = LauncherPhase.RUNNING
    assert told.poll() is None
    assert told.node.said == ["leave: SIGTERM"]
    told.node.has_left = True
    assert told.poll() == 75


def test_workers_that_have_just_started_and_know_no_order_end_with_the_next_poll() -> None:
    told = Told(LauncherPhase.STARTING, in_order=False)
    assert told.sigterm() is None
    told.leaving.phase = LauncherPhase.RUNNING
    assert told.poll() == 75
    assert told.node.said == ["leave: SIGTERM", "workers end"]


def test_a_node_that_has_finished_takes_nothing_back() -> None:
    told = Told(LauncherPhase.FINISHING)
    assert told.sigterm() == 75
    assert told.node.said == []


@pytest.mark.parametrize("phase", [LauncherPhase.CLOSING, LauncherPhase.PARKED])
def test_an_agent_that_ends_anyway_is_left_to_it(phase: LauncherPhase) -> None:
    told = Told(phase)
    assert told.sigterm() is None
    assert told.leaving.is_requested
    assert told.node.said == []


def test_a_second_signal_changes_nothing() -> None:
    told = Told(LauncherPhase.RUNNING)
    told.sigterm()
    told.clock.advance(GRACE_S / 2)
    assert told.sigterm() is None
    assert told.node.said == ["leave: SIGTERM"]
    told.clock.advance(GRACE_S / 2 + 0.1)  # counted from the first
    assert told.poll() == 75


@pytest.mark.parametrize(
    "phase", [LauncherPhase.WAITING, LauncherPhase.RUNNING, LauncherPhase.FINISHING]
)
def test_a_program_is_told_with_an_exception_of_its_own(phase: LauncherPhase) -> None:
    leaving = Leaving(
        Node(in_order=False),
        GRACE_S,
        lambda: None,
        claim_signal=lambda name: None,
        end=lambda: ValueError("told"),
    )
    leaving.phase = phase
    with pytest.raises(ValueError, match="told"):
        leaving(signal.SIGTERM, None)


def test_a_signal_that_the_launch_does_not_end_with_is_remembered() -> None:
    assert not Told(LauncherPhase.CLOSING).leaving.was_kept_from_launcher
    closing, starting, heeded = (
        Told(LauncherPhase.CLOSING),
        Told(LauncherPhase.STARTING),
        Told(LauncherPhase.STARTING),
    )
    for told in (closing, starting, heeded):
        told.sigterm()
    assert heeded.poll() == 75
    kept = [told.leaving.was_kept_from_launcher for told in (closing, starting, heeded)]
    assert kept == [True, True, False]
