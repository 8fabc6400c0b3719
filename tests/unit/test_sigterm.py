"""SIGTERM in a worker that ends for good: what is left to save is saved, or told."""

from __future__ import annotations

import subprocess
import sys

from elastic.worker.sigterm import EXIT_CODE

SCRIPT = """
import os, signal, time
from elastic.worker.sigterm import end_on_sigterm
def last_words():
    print("saving", flush=True)
    {action}
end_on_sigterm(last_words, lambda: {for_good})
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def ended(action: str = "pass", for_good: bool = True) -> subprocess.CompletedProcess[str]:
    code = SCRIPT.format(action=action, for_good=for_good)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)


def test_it_saves_and_ends() -> None:
    done = ended()
    assert (done.returncode, done.stdout) == (EXIT_CODE, "saving\n")


def test_a_save_that_fails_is_told() -> None:
    done = ended(action="raise OSError('the disk is gone')")
    assert done.returncode == EXIT_CODE
    assert "saving at SIGTERM failed" in done.stderr
    assert "the disk is gone" in done.stderr


def test_nothing_is_saved_before_a_restart() -> None:
    done = ended(for_good=False)
    assert (done.returncode, done.stdout) == (EXIT_CODE, "")
