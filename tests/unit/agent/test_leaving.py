"""SIGTERM to an agent: the effect depends on the phase of the launcher."""

from __future__ import annotations

import signal

import pytest
from kit.manual_clock import ManualClock

from elastic.agent.ending import LauncherPhase, Leaving

GRACE_S = 20.0


class Node:
    """The part of a node's service that leaving uses."""

    def __init__(self, *, in_order: bool) -> None:
        self.can_leave_gracefully = in_order
        self.has_left = False
        self.calls: list[str] = []

    def leave(self, reason: str) -> None:
        self.calls.append(f"leave: {reason}")

    def expect_end_of_workers(self) -> None:
        self.calls.append("workers end")


class SignalledNode:
    """A node, its signal handler and its clock."""

    def __init__(self, phase: LauncherPhase, *, in_order: bool = True) -> None:
        self.node = Node(in_order=in_order)
        self.clock = ManualClock()
        self.leaving = Leaving(
            self.node,
            GRACE_S,
            lambda: self.node.calls.append("killed"),
            self.clock,
            handle_signals=lambda handler: None,
        )
        self.leaving.phase = phase

    def sigterm(self, number: signal.Signals = signal.SIGTERM) -> int | None:
        """The exit code, if the handler exits at once."""
        try:
            self.leaving(number, None)
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


def test_an_agent_waits_for_workers_that_leave_gracefully() -> None:
    signalled = SignalledNode(LauncherPhase.RUNNING)
    assert signalled.sigterm() is None
    assert signalled.node.calls == ["leave: SIGTERM"]
    signalled.clock.advance(GRACE_S - 1)
    assert signalled.poll() is None
    signalled.node.has_left = True
    assert signalled.poll() == 75
    assert "killed" not in signalled.node.calls


def test_workers_are_killed_after_the_exit_grace() -> None:
    signalled = SignalledNode(LauncherPhase.RUNNING)
    signalled.sigterm()
    signalled.clock.advance(GRACE_S + 0.1)
    assert signalled.poll() == 75
    # In this order, since an expected exit of a worker is no failure.
    assert signalled.node.calls[:3] == ["leave: SIGTERM", "workers end", "killed"]


@pytest.mark.parametrize("phase", [LauncherPhase.WAITING, LauncherPhase.RUNNING])
def test_a_node_that_cannot_leave_gracefully_exits_at_once(phase: LauncherPhase) -> None:
    signalled = SignalledNode(phase, in_order=False)
    assert signalled.sigterm() == 75
    assert signalled.node.calls == ["leave: SIGTERM", "workers end"]


def test_starting_workers_leave_gracefully_once_started() -> None:
    signalled = SignalledNode(LauncherPhase.STARTING)
    assert signalled.sigterm() is None
    assert signalled.node.calls == []
    signalled.leaving.phase = LauncherPhase.RUNNING
    assert signalled.poll() is None
    assert signalled.node.calls == ["leave: SIGTERM"]
    signalled.node.has_left = True
    assert signalled.poll() == 75


def test_started_workers_without_graceful_leave_end_at_the_next_poll() -> None:
    signalled = SignalledNode(LauncherPhase.STARTING, in_order=False)
    assert signalled.sigterm() is None
    signalled.leaving.phase = LauncherPhase.RUNNING
    assert signalled.poll() == 75
    assert signalled.node.calls == ["leave: SIGTERM", "workers end"]


def test_a_finished_node_exits_without_leaving() -> None:
    signalled = SignalledNode(LauncherPhase.FINISHING)
    assert signalled.sigterm() == 75
    assert signalled.node.calls == []


@pytest.mark.parametrize("phase", [LauncherPhase.CLOSING, LauncherPhase.PARKED])
def test_a_closing_or_parked_agent_only_records_the_signal(phase: LauncherPhase) -> None:
    signalled = SignalledNode(phase)
    assert signalled.sigterm() is None
    assert signalled.leaving.is_requested
    assert signalled.node.calls == []


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGHUP, 75), (signal.SIGQUIT, 75), (signal.SIGUSR1, 75)],
)
def test_every_signal_lets_the_workers_leave_gracefully(number: signal.Signals, code: int) -> None:
    signalled = SignalledNode(LauncherPhase.RUNNING)
    assert signalled.sigterm(number) is None
    assert signalled.node.calls == [f"leave: {number.name}"]
    signalled.node.has_left = True
    assert signalled.poll() == code


def test_a_second_signal_has_no_effect() -> None:
    signalled = SignalledNode(LauncherPhase.RUNNING)
    signalled.sigterm()
    signalled.clock.advance(GRACE_S / 2)
    assert signalled.sigterm() is None
    assert signalled.node.calls == ["leave: SIGTERM"]
    signalled.clock.advance(GRACE_S / 2 + 0.1)  # counted from the first
    assert signalled.poll() == 75


@pytest.mark.parametrize(
    "phase", [LauncherPhase.WAITING, LauncherPhase.RUNNING, LauncherPhase.FINISHING]
)
def test_the_exception_of_an_embedding_program_is_raised(phase: LauncherPhase) -> None:
    leaving = Leaving(
        Node(in_order=False),
        GRACE_S,
        lambda: None,
        handle_signals=lambda handler: None,
        end=lambda signum: ValueError(f"signalled by {signum}"),
    )
    leaving.phase = phase
    with pytest.raises(ValueError, match="signalled by 1"):
        leaving(signal.SIGHUP, None)


def test_a_signal_that_did_not_end_the_launch_is_recorded() -> None:
    assert not SignalledNode(LauncherPhase.CLOSING).leaving.was_kept_from_launcher
    closing, starting, heeded = (
        SignalledNode(LauncherPhase.CLOSING),
        SignalledNode(LauncherPhase.STARTING),
        SignalledNode(LauncherPhase.STARTING),
    )
    for signalled in (closing, starting, heeded):
        signalled.sigterm()
    assert heeded.poll() == 75
    kept = [signalled.leaving.was_kept_from_launcher for signalled in (closing, starting, heeded)]
    assert kept == [True, True, False]
