"""SIGTERM in a worker that exits: it saves its state, or reports the failure."""

from __future__ import annotations

import subprocess
import sys

import pytest

from elastic.testing.forks.server import run_forked
from elastic.worker.sigterm import EXIT_CODE

pytestmark = pytest.mark.timeout(240)

SCRIPT = """
import os, signal, time
from elastic.train.current import Halt, Place
from elastic.testing.forks.server import run_forked
from elastic.worker.sigterm import end_on_sigterm
halt = Halt()
def shutdown_hook(is_for_good):
    print("saving for good" if is_for_good else "saving before a restart", flush=True)
    {action}
end_on_sigterm(shutdown_hook, lambda: {for_good}, halt.on_signal)
until = time.monotonic() + 60
changes = 0
os.kill(os.getpid(), signal.SIGTERM)
while time.monotonic() < until:
    changes += 1
"""


def ended(action: str = "pass", for_good: bool = True) -> subprocess.CompletedProcess[str]:
    code = SCRIPT.format(action=action, for_good=for_good)
    return run_forked([sys.executable, "-c", code], timeout_s=200)


def test_a_worker_saves_and_exits() -> None:
    done = ended()
    assert (done.returncode, done.stdout) == (EXIT_CODE, "saving for good\n")


def test_a_failed_save_is_reported() -> None:
    done = ended(action="raise OSError('the disk is gone')")
    assert done.returncode == EXIT_CODE
    assert "saving at SIGTERM failed" in done.stderr
    assert "the disk is gone" in done.stderr


def test_the_shutdown_hook_learns_of_a_restart() -> None:
    done = ended(for_good=False)
    assert (done.returncode, done.stdout) == (EXIT_CODE, "saving before a restart\n")


def test_the_interrupted_main_thread_makes_no_more_changes() -> None:
    done = ended(
        """
    halt.interrupt(lambda: False)
    at = changes
    while changes == at:
        time.sleep(0.01)
    assert halt.place is None, "it may not stop there"
    halt.interrupt(lambda: True)
    while halt.place is not Place.STEP:
        time.sleep(0.01)
    at = changes
    time.sleep(0.2)
    print("stopped" if changes == at else "running", flush=True)
"""
    )
    assert (done.returncode, done.stdout) == (EXIT_CODE, "saving for good\nstopped\n"), done
