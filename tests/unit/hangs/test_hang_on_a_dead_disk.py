"""Workers may hang because of the file system that holds reports, logs and checkpoints: neither the
agent nor the doctor waits for it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kit.hang_watches import hang_response, hang_watch
from kit.journal import MemoryJournal
from rank_facts import rank_facts
from silent_fuse import mounted

from elastic.hangs import kernel
from elastic.hangs import report as response_module
from elastic.hangs import watch as watch_module
from elastic.hangs.page import BudgetPolicy
from elastic.hangs.report import HangReport, Judged, ReportFolder
from elastic.hangs.verdict import Confidence, HangAction, HangKind, Judgment
from elastic.hangs.watch import Supervised, WatchedWorker
from elastic.telemetry.events import Event, HangFound
from elastic.telemetry.log import get_logger
from elastic.testing.waiting import PATIENCE_S, eventually


class Events(MemoryJournal):
    """A journal that records its events."""

    def __init__(self) -> None:
        self.seen: list[Event] = []

    def emit(self, event: Event, *, level: int = 0) -> None:
        self.seen.append(event)


@pytest.fixture
def dead_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "shared") as path:
        yield path


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_a_hung_worker_is_killed_although_the_report_cannot_be_written(
    dead_disk: Path, worker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response_module, "HANG_REPORT_WRITTEN_S", 0.2)
    event = end_hung(worker, ReportFolder(str(dead_disk / "reports")), dead_disk / "error.json")
    assert event.report == "", "no path of a missing file"


def test_an_unexpected_error_in_a_report_is_logged_with_its_cause(
    tmp_path: Path,
    worker: subprocess.Popen[bytes],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(response_module, "HANG_REPORT_WRITTEN_S", PATIENCE_S)

    class Broken(ReportFolder):
        def write(self, path: Path, report: HangReport) -> str:
            raise ZeroDivisionError("no ranks")

    logger = get_logger()
    logger.addHandler(caplog.handler)
    try:
        event = end_hung(worker, Broken(str(tmp_path)), tmp_path / "error.json")
    finally:
        logger.removeHandler(caplog.handler)
    assert event.report == ""
    assert "failed unexpectedly: ZeroDivisionError: no ranks" in caplog.text
    assert "did not answer" not in caplog.text


def end_hung(worker: subprocess.Popen[bytes], folder: ReportFolder, error_file: Path) -> HangFound:
    """Let an agent detect that the worker hangs, and kill it."""
    journal = Events()
    response = hang_response(folder, journal=journal)
    watch = hang_watch()
    watch.supervise((Supervised(worker.pid, 0, str(error_file)),))

    def watched() -> WatchedWorker | None:
        watch.run_tasks()
        return watch.worker(worker.pid)

    eventually(watched, "the worker")
    culprit = rank_facts(0, pid=worker.pid, quiet_s=9.0)
    verdict = Judgment(
        action=HangAction.KILL,
        kind=HangKind.ABSENT,
        culprits=(0,),
        culprit=culprit,
        confidence=Confidence.HIGH,
        reason="rank 0 on n1 hangs",
    )
    response.carry_out(watch, Judged(verdict=verdict, generation=7, size=2, ranks=(culprit,)))
    assert worker.wait(PATIENCE_S) == -signal.SIGKILL
    (event,) = journal.seen
    assert isinstance(event, HangFound)
    return event


def test_a_killed_worker_that_the_kernel_does_not_end_is_reported_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "HANG_KILL_S", 0.2)
    with mounted(tmp_path / "shared", takes_requests=True) as folder:
        code = f"import os; print('begins', flush=True); os.stat({str(folder / 'data')!r})"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        unkillable: list[int] = []
        watch = hang_watch(
            policy=BudgetPolicy(hang_timeout_s=60.0),
            tick_s=0.05,
            on_unkillable=lambda worker, facts: unkillable.append(worker.pid),
        )
        watch.start()
        try:
            watch.supervise((Supervised(process.pid, 0, ""),))
            eventually(lambda: kernel.waits_for_fuse(kernel.wait_channel(process.pid)))
            process.kill()
            eventually(lambda: unkillable)
            assert process.poll() is None, "it still exists"
        finally:
            watch.close()
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert unkillable == [process.pid], "reported once"


def test_a_process_whose_other_thread_is_blocked_has_not_ended() -> None:
    """Its main thread is a zombie: a checkpoint was being written by another one."""
    ended = kernel.ProcessTimes(state="Z", cpu_s=0.0, major_faults=0, threads=0)
    assert not kernel.is_doomed(1 << 22, ended)
    assert kernel.is_doomed(1 << 22, replace(ended, threads=2))
