"""What /proc and the cgroup report about a hung worker, for the verdict and the report."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rank_facts import rank_facts
from silent_fuse import mounted

from elastic.hangs import kernel
from elastic.hangs.page import BudgetPolicy, KernelFacts, Phase
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
        children = kernel.children(process.pid)  # they hold its pipe open
        process.kill()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        process.communicate()


def test_a_blocked_read_is_reported_with_its_file_and_file_system(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    pid = run(READING, path).pid
    eventually(lambda: kernel.file_of_call(pid) == str(path), "the call, not one of the start")
    mount = next(folder for folder in path.parents if os.path.ismount(folder))
    assert kernel.file_system(pid).startswith(f"{mount} (")
    assert kernel.describe_process(pid)["file of the call"] == str(path)
    assert "file system" not in kernel.describe_process(pid), "it is asleep, not blocked"


def test_remote_file_systems_are_listed_if_the_call_names_no_file(
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


@pytest.mark.parametrize("call", ["os.stat(sys.argv[1])", "os.open(sys.argv[1], os.O_RDONLY)"])
def test_an_unresponsive_fuse_daemon_is_named_for_a_sleeping_process(
    run: Run, tmp_path: Path, call: str
) -> None:
    with mounted(tmp_path / "bucket") as path:
        process = run(f"import os, sys; {call}", path)

        def is_waiting() -> bool:
            return kernel.waits_for_fuse(kernel.wait_channel(process.pid))

        eventually(is_waiting, "the call")
        times = kernel.process_times(process.pid)
        assert times is not None and times.state == "S"
        assert f"{path} (fuse.silent)" in kernel.file_system(process.pid)


def verdict_on(process: subprocess.Popen[str], phase: Phase = Phase.COMPUTE) -> str:
    """The reason of the verdict on a real sleeping process."""
    facts = KernelFacts(
        wait_channel=eventually(partial(kernel.wait_channel, process.pid), "its sleep"),
        call_target=kernel.call_target(process.pid),
    )
    asleep = rank_facts(1, phase=phase, outer=Phase.SCRIPT, quiet_s=50.0, kernel=facts)
    waiting = replace(asleep, rank=0, phase=Phase.COLLECTIVE, kernel=KernelFacts())
    return judge([waiting, asleep], 2, BudgetPolicy()).reason


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (READING, " on {path}: nobody writes to the pipe that it reads"),
        (
            "import os, sys; os.mkfifo(sys.argv[1]); f = os.open(sys.argv[1], os.O_RDWR)\n"
            "while True: os.write(f, bytes(1 << 20))",
            " on {path}: nobody reads the pipe it writes to",
        ),
        (
            "import os, sys; os.mkfifo(sys.argv[1]); open(sys.argv[1])",
            ": nobody has opened the other end of a named pipe",
        ),
        (
            "import os; _, t = os.openpty(); os.dup2(t, 0); os.read(0, 1)",
            " on its standard input: it waits for input from a terminal",
        ),
        (
            "import fcntl, os, sys\n"
            "a, b = open(sys.argv[1], 'w'), open(sys.argv[1])\n"
            "fcntl.flock(a, fcntl.LOCK_EX); fcntl.flock(b, fcntl.LOCK_EX)",
            ": another process holds the lock of a file",
        ),
        (
            "import socket; a, b = socket.socketpair(); a.recv(1)",
            ": the other end of a socket does not answer",
        ),
        (
            "import os, time\npid = os.fork()\ntime.sleep(60) if not pid else os.waitpid(pid, 0)",
            ": it waits for a child process to end",
        ),
        (
            "import threading; threading.Lock().acquire(); l = threading.Lock(); l.acquire(); "
            "l.acquire()",
            ": it waits for a lock, or for another thread (a deadlock)",
        ),
        ("import time; time.sleep(60)", ": it sleeps (time.sleep)"),
    ],
    ids=["read", "write", "open", "input", "flock", "socket", "child", "lock", "sleep"],
)
def test_the_verdict_names_what_a_sleeping_rank_waits_for(
    run: Run, tmp_path: Path, program: str, said: str
) -> None:
    path = tmp_path / "fifo"
    process = run(program, path)
    expected = said.format(path=path)
    try:
        eventually(lambda: expected in verdict_on(process), expected)
    except AssertionError:
        raise AssertionError(verdict_on(process)) from None


def test_waiting_for_a_busy_thread_is_distinguished_from_an_endless_loop() -> None:
    busy = KernelFacts(state="S", wait_channel="futex_do_wait", cpu_share=1.0)
    held_up = rank_facts(1, outer=Phase.SCRIPT, quiet_s=50.0, kernel=busy)
    waiting = replace(held_up, rank=0, phase=Phase.COLLECTIVE, kernel=KernelFacts())
    assert (
        "waiting for another of its threads" in judge([waiting, held_up], 2, BudgetPolicy()).reason
    )
    loops = replace(held_up, kernel=replace(busy, state="R", wait_channel=""))
    assert "using CPU: an endless loop" in judge([waiting, loops], 2, BudgetPolicy()).reason


FORKED = """
import os, threading, time
lock = threading.Lock()
lock.acquire()
for number in range(3):
    if os.fork() == 0:
        lock.acquire() if number == 1 else time.sleep(600)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_data_worker_blocked_on_a_lock_differs_from_idle_ones(run: Run, tmp_path: Path) -> None:
    process = run(FORKED, tmp_path)

    def waits() -> str:
        said = kernel.data_worker_waits(process.pid)
        is_complete = said.startswith("1 in futex") and said.endswith(", 2 in hrtimer_nanosleep")
        return said if is_complete else ""

    found = eventually(waits, "one that waits for a lock, and two that sleep")
    facts = KernelFacts(data_workers="SSS", data_worker_waits=found)
    asleep = rank_facts(1, phase=Phase.DATA, quiet_s=50.0, kernel=facts)
    waiting = replace(asleep, rank=0, phase=Phase.COLLECTIVE, kernel=KernelFacts())
    reason = judge([waiting, asleep], 2, BudgetPolicy()).reason
    assert f"(data workers in state SSS, {found}: perhaps a lock that was held" in reason


def test_a_process_that_has_ended_yields_no_facts() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert kernel.file_system(process.pid) == kernel.file_of_call(process.pid) == ""
    assert kernel.describe_process(process.pid) == {}


def test_the_verdict_names_the_unresponsive_file_system() -> None:
    stuck = KernelFacts(
        state="D", wait_channel="rpc_wait_bit_killable", file_system="/shared (nfs4)"
    )
    blocked = rank_facts(1, node="n2", outer=Phase.SCRIPT, quiet_s=5.0, kernel=stuck)
    waiting = replace(blocked, rank=0, node="n1", phase=Phase.COLLECTIVE, kernel=KernelFacts())
    reason = judge([waiting, blocked], 2, BudgetPolicy()).reason
    assert "in rpc_wait_bit_killable: /shared (nfs4) does not answer" in reason


def test_interface_errors_and_cgroup_memory_events_are_read(
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


def test_recent_lines_of_the_kernel_log_are_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    log = [
        "6,1,1000000,-;nfs: server a not responding, still trying",
        "6,2,990000000,-;eth0: renamed from veth1",
        "3,3,991000000,-;nfs: server a not responding, still trying\n SUBSYSTEM=x",
        "no record",
    ]
    assert kernel.relevant_lines(log, 1000.0) == [
        "nfs: server a not responding, still trying (9 s ago)"
    ]
    many = [f"3,{n},{n}000000,-;Buffer I/O error on dev sda, block {n}" for n in range(990, 999)]
    assert [line.split()[7] for line in kernel.relevant_lines(many, 1000.0)] == [
        str(n) for n in range(994, 999)
    ]
    monkeypatch.setattr(kernel, "_kernel_log", lambda: log)
    monkeypatch.setattr(kernel, "_uptime_s", lambda: 1000.0)
    assert "not responding" in kernel.describe_node()["kernel log"]


def test_the_kernel_log_of_this_machine_is_read_to_its_end() -> None:
    assert all(isinstance(record, str) for record in kernel._kernel_log())


def test_a_thread_that_is_awake_for_a_moment_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that waits for the interpreter lock, every 5 ms."""
    looks = iter(["", "", "futex_wait_queue"])
    monkeypatch.setattr(kernel, "wait_channel", lambda pid: next(looks))
    assert kernel.wait_channel_of_sleeper(1) == "futex_wait_queue"
    monkeypatch.setattr(kernel, "wait_channel", lambda pid: "")
    assert kernel.wait_channel_of_sleeper(1) == ""
