"""Proof of death on one host."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

from elastic.agent.identity import current_process, proved_gone

ME = current_process()


def test_a_live_process_is_not_proved_gone() -> None:
    assert not proved_gone(ME, ME)


def test_a_reused_pid_is_recognised_by_its_start_time() -> None:
    assert proved_gone(replace(ME, start_ticks=ME.start_ticks - 1), ME)


def test_a_rebooted_host_proves_it() -> None:
    assert proved_gone(replace(ME, boot_id="another boot"), ME)


def test_nothing_is_proved_about_another_host_or_pid_namespace() -> None:
    dead = replace(ME, pid=2**22 + 1)
    assert proved_gone(dead, ME)
    assert not proved_gone(replace(dead, host="another"), ME)
    assert not proved_gone(replace(dead, pid_namespace=1), ME)


def test_a_zombie_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "pass"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()  # closed when it has exited; it is not reaped yet
    with open(f"/proc/{child.pid}/stat") as stat:
        ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
    # The pipe closes a moment before the process turns into a zombie.
    deadline = time.monotonic() + 5
    dead = replace(ME, pid=child.pid, start_ticks=ticks)
    while not proved_gone(dead, ME):
        assert time.monotonic() < deadline
    child.wait()
