"""Proof of death on one host."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.identity import current_process, proved_gone
from elastic.testing.waiting import eventually

ME = current_process()


def test_a_live_process_is_not_proved_dead() -> None:
    assert not proved_gone(ME.digest, ME)


def test_a_reused_pid_is_recognised_by_its_start_time() -> None:
    assert proved_gone(replace(ME, start_ticks=ME.start_ticks - 1).digest, ME)


DEAD = replace(ME, pid=2**22 + 1)


def test_a_missing_pid_on_the_same_machine_proves_death() -> None:
    assert proved_gone(DEAD.digest, ME)


@pytest.mark.parametrize(
    "other",
    [
        {"host": "another"},
        {"machine_id": "another"},  # a clone of a running machine, with a new id
        {"boot_id": "another"},  # a clone of the disk with the same name, or a reboot
        {"pod_uid": "another"},  # a pod on the same machine
        {"pid_namespace": 1},  # a container on it
    ],
)
def test_death_is_not_proved_if_any_identity_field_differs(other: dict[str, Any]) -> None:
    assert not proved_gone(replace(DEAD, **other).digest, ME)


def test_death_is_proved_in_containers_without_a_machine_id() -> None:
    here = replace(ME, machine_id="", pod_uid="7c6e")
    assert proved_gone(replace(here, pid=DEAD.pid).digest, here)


@pytest.mark.parametrize("unknown", [{"boot_id": ""}, {"pid_namespace": 0}])
def test_fields_unknown_on_both_sides_do_not_match(unknown: dict[str, Any]) -> None:
    here = replace(ME, **unknown)
    assert not proved_gone(replace(here, pid=DEAD.pid).digest, here)


def test_a_process_hidden_in_proc_is_not_proved_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with hidepid, for another user's process."""
    monkeypatch.setattr("elastic.agent.identity._stat", lambda pid: None)
    assert not proved_gone(ME.digest, ME)
    assert proved_gone(DEAD.digest, ME)


def test_proc_of_another_pid_namespace_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "readlink", lambda path: "4242")
    assert current_process().pid_namespace == 0


def test_the_pod_uid_is_part_of_the_identity() -> None:
    assert current_process("7c6e").pod_uid == "7c6e"
    assert ME.machine_id == read("/etc/machine-id")
    assert ME.boot_id == read("/proc/sys/kernel/random/boot_id") != ""


def read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def test_a_zombie_process_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "pass"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()  # closed when it has exited; it is not reaped yet
    with open(f"/proc/{child.pid}/stat") as stat:
        ticks = int(stat.read().rsplit(")", 1)[1].split()[19])
    # The pipe closes a moment before the process turns into a zombie.
    dead = replace(ME, pid=child.pid, start_ticks=ticks)
    eventually(lambda: proved_gone(dead.digest, ME))
    child.wait()
