"""``elastic doctor``'s process groups: every operation is verified, and a hung rank is named."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from etcd_fixtures import PATIENCE_S
from forked_ranks import fork_ranks

from elastic.doctor.checks import Finding, Status
from elastic.doctor.collectives import OPERATIONS as EXPECTED
from elastic.doctor.collectives import Session, torch_findings
from elastic.doctor.network import Participant, alone
from elastic.doctor.rank import OPERATIONS, SIZES, wrong
from elastic.errors import SYSTEM_CLOCK
from elastic.testing.forks.program import start_python

PROGRAM = "elastic.doctor.rank"


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the ranks; doctors started as a command fork their own."""
    fork_ranks(monkeypatch)


def participant(nproc: int) -> Participant:
    return Participant(
        node_id=secrets.token_hex(4),
        name="here",
        host_name="here",
        address="127.0.0.1",
        nproc=nproc,
    )


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    """The processes of its ranks, in rank order."""
    found = []
    for child in process.children():
        with contextlib.suppress(psutil.Error):  # it has ended in the meantime
            if PROGRAM in child.cmdline():
                found.append(child)
    return sorted(found, key=lambda child: child.create_time())


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_the_parent_expects_the_operations_that_the_ranks_run() -> None:
    assert tuple(OPERATIONS) == EXPECTED


def test_a_corrupted_element_is_detected() -> None:
    tensor = torch.full((1000,), 3.0)
    assert wrong(tensor, 3) == ""
    tensor[17] = 5.0
    assert wrong(tensor, 3) == "1 of 1000 elements are wrong: 5, not 3"
    assert wrong(torch.tensor([float("nan")]), 3) == "1 of 1 elements are wrong: nan, not 3"


def test_every_operation_passes_on_three_local_processes(tmp_path: Path) -> None:
    session = Session((participant(3),), 0, alone, PATIENCE_S, str(tmp_path), lambda text: None)
    found, speeds = torch_findings(session)
    named = by_name(found)
    for operation in (*EXPECTED, "init env://", "init tcp://", "init file://"):
        one = named[f"gloo {operation}"]
        assert one.status is Status.OK, one
        assert "correct on 3 ranks" in one.measured
    assert {(s.peer, s.size_bytes) for s in speeds} == {(p, n) for p in (1, 2) for n in SIZES}
    assert all(s.torch_ms > 0 and s.raw_ms > 0 for s in speeds)
    assert "MiB" in named["gloo memory"].measured
    assert ranks_of(psutil.Process()) == []


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (signal.SIGSTOP, "is stopped"),
        pytest.param(signal.SIGKILL, "was ended by SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_a_rank_lost_during_the_checks_is_named_and_the_others_continue(
    how: signal.Signals, said: str, tmp_path: Path
) -> None:
    lost: list[int] = []
    said_s: dict[str, float] = {}

    def say(text: str) -> None:
        said_s[text] = SYSTEM_CLOCK.monotonic()
        if text == "gloo: operations":
            lost.append(ranks_of(psutil.Process())[1].pid)
            os.kill(lost[0], how)

    silence_s = 10.0
    session = Session((participant(2),), 0, alone, silence_s, str(tmp_path), say)
    found, _ = torch_findings(session)
    assert said_s["gloo: speed"] - said_s["gloo: operations"] < PATIENCE_S
    named = by_name(found)
    assert named["gloo init env://"].status is Status.OK
    failed = [f for f in found if f.status is Status.FAILED]
    assert len(failed) == 1 and failed[0].name.removeprefix("gloo ") in EXPECTED
    assert f"rank 1 (pid {lost[0]}) {said}" in failed[0].measured
    assert failed[0].remedy
    assert named["gloo new_group"].status is Status.SKIPPED
    assert named["gloo speed 0-1"].status is Status.OK  # in new processes
    assert not psutil.pid_exists(lost[0])


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_terminated_doctor_leaves_no_process(how: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "elastic.cli.main", "doctor", "--deadline=90"]
    files = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    doctor = start_python(command, env=os.environ, **files)
    ends_s = SYSTEM_CLOCK.monotonic() + PATIENCE_S
    while len(ranks := ranks_of(psutil.Process(doctor.pid))) < 2:
        assert SYSTEM_CLOCK.monotonic() < ends_s and doctor.poll() is None
        SYSTEM_CLOCK.sleep(0.02)
    doctor.send_signal(how)
    assert doctor.wait(PATIENCE_S) == code
    _, alive = psutil.wait_procs(ranks, timeout=PATIENCE_S)
    assert alive == []
