"""What /proc and the cgroup say about a worker that hangs: for the verdict and the report."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rank_facts import rank_facts

from elastic.hangs import kernel
from elastic.hangs.budgets import BudgetPolicy
from elastic.hangs.facts import KernelFacts, Phase
from elastic.hangs.verdict import judge
from elastic.testing.waiting import eventually

READING = """
import os, sys
os.mkfifo(sys.argv[1])
os.read(os.open(sys.argv[1], os.O_RDWR), 1)
"""
HOLDING = """
import sys, time
held = open(sys.argv[1], "w")
print("ready", flush=True)
time.sleep(600)
"""
MOUNTS = r"""
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
31 22 0:27 / {folder}/with\040space rw shared:5 - nfs4 server:/export rw
32 31 0:28 / {folder}/with\040space/local rw - tmpfs tmpfs rw
"""


Run = Callable[[str, Path], "subprocess.Popen[str]"]


@pytest.fixture
def run() -> Iterator[Run]:
    started: list[subprocess.Popen[str]] = []

    def start(program: str, path: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, str(path)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_file_and_the_file_system_of_a_read_that_nobody_answers(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "fifo"
    pid = run(READING, path).pid
    assert eventually(lambda: kernel.file_of_call(pid), "the call") == str(path)
    mount = next(folder for folder in path.parents if os.path.ismount(folder))
    assert kernel.file_system(pid).startswith(f"{mount} (")
    assert kernel.describe_process(pid)["file of the call"] == str(path)
    assert "file system" not in kernel.describe_process(pid), "it is asleep, not blocked"


def test_the_remote_file_systems_of_a_process_whose_call_names_no_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "with space"
    (folder / "local").mkdir(parents=True)
    read = kernel._read

    def with_mounts(path: str) -> str:
        return MOUNTS.format(folder=tmp_path) if path.endswith("/mountinfo") else read(path)

    monkeypatch.setattr(kernel, "_read", with_mounts)
    for name, expected in (("shard", f"{folder} (nfs4)"), ("local/shard", "")):
        process = run(HOLDING, folder / name)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        eventually(partial(kernel.wait_channel, process.pid), "its sleep")
        assert kernel.file_of_call(process.pid) == ""
        assert kernel.file_system(process.pid) == expected, name


def test_a_process_that_has_ended_says_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert kernel.file_system(process.pid) == kernel.file_of_call(process.pid) == ""
    assert kernel.describe_process(process.pid) == {}


def test_the_verdict_names_the_file_system_that_does_not_answer() -> None:
    stuck = KernelFacts(
        state="D", wait_channel="rpc_wait_bit_killable", file_system="/shared (nfs4)"
    )
    blocked = rank_facts(1, node="n2", outer=Phase.SCRIPT, quiet_s=5.0, kernel=stuck)
    waiting = replace(blocked, rank=0, node="n1", phase=Phase.COLLECTIVE, kernel=KernelFacts())
    reason = judge([waiting, blocked], 2, BudgetPolicy()).reason
    assert "in rpc_wait_bit_killable: /shared (nfs4) does not answer" in reason


def test_errors_of_interfaces_and_memory_events_of_either_cgroup_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {
        "/proc/self/cgroup": "4:cpu,memory:/job\n0::/pod/job\n",
        "/proc/net/dev": "head\nhead\n eth0: 9 9 1 2 0 0 0 0 9 9 3 4 0 0 0 0\n",
        "/sys/fs/cgroup/memory/job/memory.oom_control": "under_oom 0\noom_kill 3\n",
        "/sys/fs/cgroup/pod/job/io.pressure": "some avg10=80.00\nfull avg10=70.00\n",
    }
    monkeypatch.setattr(kernel, "_read", lambda path: files.get(path, ""))
    said = kernel.describe_node()
    assert said["memory events (cgroup)"] == "under_oom 0; oom_kill 3"
    assert said["pressure (io, cgroup)"] == "some avg10=80.00; full avg10=70.00"
    assert said["network interfaces"] == "eth0: 1 errors and 2 drops received, 3 and 4 sent"
    files["/sys/fs/cgroup/pod/job/memory.events"] = "oom 1\noom_kill 1\n"
    assert kernel.describe_node()["memory events (cgroup)"] == "oom 1; oom_kill 1"


def test_what_the_kernels_log_says_lately_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    log = [
        "6,1,1000000,-;nfs: server a not responding, still trying",
        "6,2,990000000,-;eth0: renamed from veth1",
        "3,3,991000000,-;nfs: server a not responding, still trying\n SUBSYSTEM=x",
        "no record",
    ]
    assert kernel.telling_lines(log, 1000.0) == [
        "nfs: server a not responding, still trying (9 s ago)"
    ]
    many = [f"3,{n},{n}000000,-;Buffer I/O error on dev sda, block {n}" for n in range(990, 999)]
    assert [line.split()[7] for line in kernel.telling_lines(many, 1000.0)] == [
        str(n) for n in range(994, 999)
    ]
    monkeypatch.setattr(kernel, "_kernel_log", lambda: log)
    monkeypatch.setattr(kernel, "_uptime_s", lambda: 1000.0)
    assert "not responding" in kernel.describe_node()["kernel log"]


def test_the_kernels_own_log_can_be_read_to_its_end() -> None:
    assert all(isinstance(record, str) for record in kernel._kernel_log())
