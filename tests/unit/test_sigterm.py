"""SIGTERM in a worker that ends for good: what is left to save is saved, or told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from elastic.testing.forks.server import run_forked
from elastic.worker.sigterm import EXIT_CODE

pytestmark = pytest.mark.timeout(240)

SCRIPT = """
import os, signal, time
from elastic.training.halt import Halt, Place
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


def test_it_saves_and_ends() -> None:
    done = ended()
    assert (done.returncode, done.stdout) == (EXIT_CODE, "saving for good\n")


def test_a_save_that_fails_is_told() -> None:
    done = ended(action="raise OSError('the disk is gone')")
    assert done.returncode == EXIT_CODE
    assert "saving at SIGTERM failed" in done.stderr
    assert "the disk is gone" in done.stderr


def test_it_is_told_that_it_will_be_started_again() -> None:
    done = ended(for_good=False)
    assert (done.returncode, done.stdout) == (EXIT_CODE, "saving before a restart\n")


def test_the_main_thread_is_interrupted_and_changes_nothing_any_more() -> None:
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
