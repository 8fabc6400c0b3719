"""Aborts of communicators: their order, their threads, and aborts that hang."""

from __future__ import annotations

import datetime
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import nccl_semantics
from kit.assignments import assignment
from kit.nccl_semantics import control
from torch.distributed import HashStore, distributed_c10d  # type: ignore[attr-defined]

from elastic.groups import group as process_group
from elastic.groups.group import (
    BuildWatch,
    CallDeadline,
    ProcessGroup,
    leave_errors_to_us,
    open_communicator,
)
from elastic.groups.pending import open_works
from elastic.telemetry.log import get_logger
from elastic.tuning import environment, intervals
from elastic.tuning.environment import TUNED
from elastic.worker.worlds import Worlds

DEADLINE_S = 60.0
SPEC = assignment()


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    """A world of one on the backend with NCCL's semantics."""
    before = dict(vars(control))
    built_group = ProcessGroup(torch.device("cpu"), nccl_semantics.register())
    built_group.build(SPEC, superseded=lambda: False, timeout_s=DEADLINE_S)
    yield built_group
    vars(control).update(before)
    control.calls.clear()
    built_group.destroy()
    open_works()


def test_a_group_is_marked_as_aborted_before_its_communicators_are(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked: list[bool] = []
    backend = distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    abort = backend.abort

    def aborting() -> None:
        marked.append(group.may_be_garbage)
        abort()

    monkeypatch.setattr(backend, "abort", aborting)
    group.abort()
    group.destroy()
    assert marked[0] is True


@pytest.mark.parametrize(
    ("is_nccl2", "expected"),
    [
        (False, ["group start", "abort", "group end"]),
        (True, ["start coalescing", "abort", "end coalescing"]),
    ],
)
def test_all_communicators_are_aborted_as_one_group(
    monkeypatch: pytest.MonkeyPatch, is_nccl2: bool, expected: list[str]
) -> None:
    """As torch's _abort_process_group does, up to torch 2.14 and since torch 2.15."""
    monkeypatch.setattr(control, "is_nccl2", is_nccl2)
    monkeypatch.setattr(control, "calls", [])
    built_group = ProcessGroup(torch.device("cpu"), nccl_semantics.register())
    built_group.build(SPEC, superseded=lambda: False, timeout_s=DEADLINE_S)
    sub = dist.new_group([0])
    assert sub is not None
    built_group.abort()
    built_group.abort()
    built_group.destroy()
    assert control.calls[:4] == [expected[0], "abort", "abort", expected[2]]
    open_works()


def test_an_abort_that_hangs_does_not_block_and_ends_the_process(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link's thread continues, because it has to send heartbeats."""
    ended, reasons = threading.Event(), []

    def end_process(reason: str, journal: object) -> None:
        reasons.append(reason)
        ended.set()

    monkeypatch.setattr(process_group, "end_process", end_process)
    monkeypatch.setattr(intervals, "ABORT_S", 0.2)
    control.hang_in_abort = True
    worlds = Worlds(abort=group.abort, position=lambda: None, current_step=lambda: None)  # type: ignore[arg-type, return-value]
    worlds.formed(1)
    link = threading.Thread(target=worlds.receive, args=(assignment(2),))
    link.start()
    link.join(DEADLINE_S)
    assert not link.is_alive()
    assert worlds.is_superseded()
    threads = {thread.name for thread in threading.enumerate()}
    assert "elastic-abort" in threads
    assert ended.wait(DEADLINE_S)
    assert "generation 1 on rank 0 of 1 has not returned for 0.2 s" in reasons[0]


@pytest.mark.parametrize(
    ("switch_at_step", "has_entered", "expected"),
    [
        (7, False, 1),  # replaces the world being formed: a member has died
        (9, False, 0),  # a later boundary: the current world trains until then
        (7, True, 0),  # this rank is at that boundary, and leaves by itself
        (None, True, 1),
    ],
)
def test_a_plan_that_replaces_the_world_being_formed_aborts_its_formation(
    switch_at_step: int | None, has_entered: bool, expected: int
) -> None:
    """On a stream its collectives do not end with an error, so that no rank would leave it."""
    aborts: list[None] = []
    worlds = Worlds(
        abort=lambda: aborts.append(None),
        position=lambda: None,  # type: ignore[arg-type, return-value]
        current_step=lambda: None,
    )
    worlds.receive(assignment(2, switch_at_step=7))
    assert worlds.next().generation == 2
    if has_entered:
        worlds.entered(7)
    worlds.receive(assignment(3, switch_at_step=switch_at_step))
    assert len(aborts) == expected
    assert worlds.is_superseded() is bool(expected)


def test_an_abandoned_build_that_continues_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intervals, "GIVEN_UP_BUILD_S", 0.1)
    stuck = threading.Event()
    footprint: Any = SimpleNamespace(shut_down=lambda: None, connect_to_itself=lambda ranks: None)
    watch = BuildWatch(footprint, DEADLINE_S, stuck.set)
    watch.give_up()
    assert stuck.wait(DEADLINE_S)
    watch.end()


def test_an_abandoned_build_that_ends_is_not_stuck() -> None:
    stuck = threading.Event()
    footprint: Any = SimpleNamespace(shut_down=lambda: None, connect_to_itself=lambda ranks: None)
    watch = BuildWatch(footprint, DEADLINE_S, stuck.set)
    watch.give_up()
    watch.end()
    assert not stuck.is_set()
    names = [thread.name for thread in threading.enumerate()]
    assert "elastic-build-deadline" not in names


FROZEN = """
import ctypes, sys, threading, time
import torch
from elastic.groups import group as communicators
from elastic.groups.group import end_process

communicators.LAST_RESORT_S = 0.5
communicators.CommunicatorAbort(
    lambda: time.sleep(3600),  # ncclCommAbort
    timeout_s=0.5,
    expire=lambda: end_process("in Python"),
)
ctypes.PyDLL(None).sleep(3600)  # Work.is_completed, which waits for the same mutex
"""


def test_an_abort_that_hangs_ends_a_process_whose_gil_is_held() -> None:
    """No Python thread runs then, neither the deadline's nor the heartbeat's."""
    done = subprocess.run(
        [sys.executable, "-c", FROZEN],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "Timeout" in done.stderr and "in Python" not in done.stderr
    assert "communicators.py" in done.stderr or "most recent call first" in done.stderr


def test_a_deadline_that_is_met_does_nothing() -> None:
    expired = threading.Event()
    deadline = CallDeadline(DEADLINE_S, expired.set, name="deadline")
    deadline.cancel()
    deadline.end()
    assert not expired.is_set()


ASYNC, OLD = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"
IN_PROCESS = {setting.name: setting.value for setting in environment.in_process_settings()}


@pytest.mark.parametrize("given", [{ASYNC: "3"}, {OLD: "1"}, {"TORCH_NCCL_DESYNC_DEBUG": "1"}])
def test_torchs_error_handling_is_overridden_with_a_warning(
    given: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first use of the logger in a process disables propagation to pytest's handler.
    monkeypatch.setattr(get_logger(), "propagate", True)
    caplog.set_level("WARNING", logger="elastic")
    environ = dict(given)
    leave_errors_to_us(environ, is_in_process=True)
    assert environ == IN_PROCESS
    assert f"{next(iter(given))}={given[next(iter(given))]} is overridden" in caplog.text


def test_without_an_override_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for environ in ({}, {ASYNC: "0"}):
        leave_errors_to_us(environ, is_in_process=True)
        assert environ == IN_PROCESS
    assert not caplog.text


def test_torchruns_own_default_is_overridden(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sets 1 for every worker."""
    # The first use of the logger in a process disables propagation to pytest's handler.
    monkeypatch.setattr(get_logger(), "propagate", True)
    caplog.set_level("INFO", logger="elastic")
    environ = {ASYNC: "1"}
    leave_errors_to_us(environ, is_in_process=True)
    assert environ == IN_PROCESS
    assert "is 0 for in-process recovery; it was 1" in caplog.text


def test_values_set_by_the_agent_are_overridden_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("WARNING", logger="elastic")
    environ = {ASYNC: "3", TUNED: f"GLOO_SOCKET_IFNAME,{ASYNC}"}
    leave_errors_to_us(environ, is_in_process=True)
    assert environ == {**IN_PROCESS, TUNED: environ[TUNED]}
    assert not caplog.text


def test_the_watchdog_of_an_aborted_group_ends_before_the_abort_deadline() -> None:
    """It sleeps four times the dump timeout, and the destructor of a group joins it."""
    environ: dict[str, str] = {}
    leave_errors_to_us(environ, is_in_process=True)
    assert 4 * int(environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]) < intervals.ABORT_S * 1000
    assert environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"


def test_dumps_enabled_by_the_user_are_kept() -> None:
    environ = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    leave_errors_to_us(environ, is_in_process=True)
    assert environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


def test_in_restart_mode_the_users_error_handling_is_kept() -> None:
    environ = {ASYNC: "3", OLD: "1"}
    leave_errors_to_us(environ, is_in_process=False)
    assert environ == {ASYNC: "3", OLD: "1"}


def test_a_group_that_is_not_destroyed_in_time_ends_the_process(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before another one is built: a peer may have died since the switch was planned."""
    ended, continued = threading.Event(), threading.Event()
    monkeypatch.setattr(process_group, "end_process", lambda reason, journal: ended.set())
    monkeypatch.setattr(intervals, "DESTROY_S", 0.1)
    default = distributed_c10d._get_default_group()
    shutdown = default.shutdown

    def shutting_down() -> None:
        assert ended.wait(DEADLINE_S)
        continued.set()
        shutdown()

    monkeypatch.setattr(default, "shutdown", shutting_down)
    group.destroy(is_for_next=True)
    assert continued.is_set()


class OpenedByTorch:
    """A backend as created by torch 2.15, which connects to its peers eagerly on request."""

    supports_splitting = True

    def __init__(self, described: Any, options: Any) -> None:
        assert options is None
        self.described = (described.group_rank, described.group_size, described.timeout)
        self.connected: torch.device | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected = device


def test_a_communicator_is_opened_as_in_torch_and_connects_eagerly() -> None:
    timeout = datetime.timedelta(seconds=5)
    dist.Backend.register_backend(
        "as_torch_2_15", OpenedByTorch, extended_api=True, devices=["cuda"]
    )
    opened = open_communicator(
        "as_torch_2_15", HashStore(), 1, 3, device=torch.device("cuda", 2), timeout=timeout
    )
    assert opened.described == (1, 3, timeout)
    assert opened.connected == torch.device("cuda", 2)


def test_up_to_torch_2_14_the_built_in_nccl_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class BuiltIn:
        """As ProcessGroupNCCL is bound (torch/csrc/distributed/c10d/init.cpp)."""

        supports_splitting = True
        Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            calls.append((rank, size, options._timeout, options.is_high_priority_stream))

        def _set_sequence_number_for_group(self) -> None:
            calls.append("counts")

        def eager_connect_single_device(self, device: torch.device) -> None:
            calls.append(device)

    timeout, device = datetime.timedelta(seconds=5), torch.device("cuda", 0)
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", BuiltIn, raising=False)
    monkeypatch.setattr(dist.Backend, "_plugins", {})
    open_communicator("nccl", HashStore(), 0, 2, device=device, timeout=timeout)
    assert calls == [(0, 2, timeout, False), "counts", device]
