"""An interrupted or killed benchmark or test run leaves no process behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.testing.forks.child import fork
from elastic.testing.processes import Process, kill_owned_by, owned_by, react_to_signals, send
from elastic.testing.waiting import PATIENCE_S, eventually

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MARK = "TEST_OF_KILLED_OWNERS"
# Agents with an orphan reaper, and stock torchrun, which has none.
OURS = ("restart.py", "--kills=1", "--peers=0")  # at the interrupt, nothing trains yet
STOCK = (
    *(
        "recovery.py",
        "--steady=1",
        "--steps=10000000",
        "--turns=0",
        "--kills=0",
        "--busy-kills=0",
        "--outages=0",
    ),
    *("--peers=0", "--torchft=0", "--torchft-tight=0"),
)
STARTS_A_NODE = """
import sys, time
from pathlib import Path
from elastic.testing.node import LocalNode
child = "import subprocess, time; subprocess.Popen(['sleep', '600'], start_new_session=True); \
time.sleep(600)"
LocalNode("node", [sys.executable, "-c", child], {}, "token/0", Path(sys.argv[1]))
time.sleep(600)
"""


class Owner:
    """A process that starts others; all of them are marked."""

    def __init__(self, *command: str) -> None:
        self._token = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, MARK: self._token},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=react_to_signals,
        )

    def started(self) -> list[Process]:
        """Live processes that it started, directly or indirectly."""
        return [p for p in owned_by(MARK, self._token) if p.pid != self._process.pid]

    def end(self, how: signal.Signals) -> None:
        send(self._process.pid, how)
        self._process.wait()

    def close(self) -> None:
        self.end(signal.SIGKILL)
        kill_owned_by(MARK, self._token)


@pytest.fixture
def owner(request: pytest.FixtureRequest) -> Iterator[Owner]:
    script, *arguments = request.param
    owner = Owner(str(BENCHMARKS / script), *arguments)
    yield owner
    owner.close()


def is_worker(process: Process) -> bool:
    return "LOCAL_RANK" in process.environment


def is_agent(process: Process) -> bool:
    return "torch.distributed.run" in process.command and not is_worker(process)


@pytest.mark.parametrize(
    ("owner", "how"),
    [
        (OURS, signal.SIGTERM),
        pytest.param(OURS, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(STOCK, signal.SIGKILL, marks=pytest.mark.slow),
    ],
    indirect=["owner"],
)
def test_no_process_outlives_a_benchmark(owner: Owner, how: signal.Signals) -> None:
    is_awaited = is_worker if how is signal.SIGKILL else is_agent
    eventually(lambda: any(map(is_awaited, owner.started())), "a process of torchrun")
    owner.end(how)
    eventually(lambda: owner.started() == [], "the end of all that the benchmark started")


def test_no_process_of_a_node_outlives_its_launcher(tmp_path: Path) -> None:
    """Nor a process that its agent started in a separate session."""
    token = uuid.uuid4().hex
    program = STARTS_A_NODE.replace("{}, ", f"{{'{MARK}': '{token}', 'PATH': '/bin:/usr/bin'}}, ")
    starter = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "log")])
    try:
        eventually(
            lambda: any("sleep 600" in p.command for p in owned_by(MARK, token)),
            "the process of the agent",
        )
    finally:
        starter.kill()
        starter.wait()
    try:
        eventually(lambda: owned_by(MARK, token) == [], "the end of the node")
    finally:
        kill_owned_by(MARK, token)


def test_a_fork_ends_with_the_process_that_forked_it() -> None:
    """Verified one level down: with the fork of a fork, which is killed."""
    read, write = os.pipe()

    def report_and_wait() -> None:
        os.write(write, b"x")
        signal.pause()

    def fork_and_wait() -> None:
        fork(report_and_wait)
        signal.pause()

    child = fork(fork_and_wait)
    os.close(write)
    with open(read, "rb", buffering=0) as held:
        assert held.read(1) == b"x"
        send(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert select.select([held], [], [], PATIENCE_S)[0], "the fork is alive"
        assert held.read(1) == b""
