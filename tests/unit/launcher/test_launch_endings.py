"""The end of a launch: an exception for programs, an exit code for command lines."""

from __future__ import annotations

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from elastic.agent.node import JobSucceeded
from elastic.errors import (
    BudgetSpent,
    CheckpointRequired,
    ConfigError,
    ElasticError,
    JobFailed,
    JoinTimeout,
    NodeRefused,
    NodeUnfit,
    RecordError,
    StoreFull,
    StoreUnreachable,
)
from elastic.launcher.launch import ending, failed_without_restart, why_left
from elastic.launcher.torch_agent import Launcher, WorkerFailure

TRACEBACK = """Traceback (most recent call last):
  File "/home/a/t.py", line 3, in <module>
    fail()
ValueError: boom"""
FAILURE = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="<N/A>")
RAISED = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file="<N/A>")
RAISED.error_file_data = {
    "message": {
        "message": "ValueError: boom",
        "extraInfo": {"py_callstack": TRACEBACK, "timestamp": "1"},
    }
}
ENDINGS = [
    (JobSucceeded("done"), RendezvousClosedError, 0),
    (JobFailed("failed"), RendezvousClosedError, 1),
    (BudgetSpent("spent"), RendezvousClosedError, 70),
    (CheckpointRequired("none"), RendezvousClosedError, 65),
    (JoinTimeout("alone"), RendezvousTimeoutError, 1),
    (StoreUnreachable("no etcd"), RendezvousConnectionError, 69),
    (StoreFull("full"), RendezvousConnectionError, 69),
    (RecordError("newer"), RendezvousStateError, 69),
    (NodeRefused("other limits"), RendezvousError, 2),
    (NodeUnfit("sick"), RendezvousError, 71),
    (ConfigError("wrong"), RendezvousError, 2),
]


@pytest.mark.parametrize(("error", "kind", "code"), ENDINGS)
def test_a_program_receives_torchs_exception(
    error: ElasticError | JobSucceeded, kind: type[RendezvousError], code: int
) -> None:
    ended = ending(error, Launcher.PROGRAM)
    assert type(ended) is kind
    assert str(ended) == str(error)


@pytest.mark.parametrize("launcher", [Launcher.TORCHRUN, Launcher.RUN])
@pytest.mark.parametrize(("error", "kind", "code"), ENDINGS)
def test_a_command_line_exits_with_the_code_unless_it_is_caught(
    error: ElasticError | JobSucceeded, kind: type[RendezvousError], code: int, launcher: Launcher
) -> None:
    ended = ending(error, launcher)
    assert isinstance(ended, kind) and isinstance(ended, Exception)
    assert isinstance(ended, SystemExit) and ended.code == code
    assert str(ended) == str(error)


@pytest.mark.parametrize(
    ("failure", "why"),
    [
        (None, "its workers ended without having joined the job"),
        (KeyboardInterrupt(), "interrupted"),
        (ChildFailedError("train.py", {0: FAILURE}), "its workers failed: exit code 1"),
        (
            ChildFailedError("train.py", {0: RAISED}),
            "its workers failed: ValueError: boom (t.py:3)",
        ),
        (RuntimeError("no\nmore"), "RuntimeError: no"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_the_reason_for_leaving_is_a_sentence(failure: BaseException | None, why: str) -> None:
    assert why_left(failure) == why


def test_a_full_store_does_not_hide_why_the_workers_failed() -> None:
    full = StoreFull("etcd is full", hint="free it")
    error = failed_without_restart(WorkerFailure(text="ValueError: bad loss", exit_code=1), full)
    assert isinstance(error, JobFailed)
    assert "ValueError: bad loss" in error.message and "etcd is full" in error.message
    assert error.hint == "free it"
