"""Detection of OOM kills from the files of a cgroup."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import cast

import pytest
from test_worker_deaths import Context

from elastic.agent.identity import OomKillCounter
from elastic.agent.node import NodeContext
from elastic.agent.workers import Workers
from elastic.link.link import ClientHandshakeRequest, Exiting, Ready, Worker, WorkerDeath
from elastic.membership.failures import FailureFacts, judge_failure

EVENTS = "low 0\nhigh 3\nmax 71\noom 2\noom_kill {}\noom_group_kill 0\n"
OOM_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


class FakeCgroup:
    """A cgroup's files, below a folder that replaces /sys/fs/cgroup."""

    def __init__(self, folder: Path, membership: str, file: str, text: str) -> None:
        self.cgroups, self.membership = folder / "cgroups", folder / "membership"
        self.membership.write_text(membership)
        self._file, self._text = self.cgroups / file, text
        self._file.parent.mkdir(parents=True)
        self.kills(0)

    def kills(self, count: int) -> None:
        self._file.write_text(self._text.format(count))

    def counter(self) -> OomKillCounter:
        return OomKillCounter(self.cgroups, self.membership)


PLACES = {
    "v2": ("0::/job/worker.scope\n", "job/worker.scope/memory.events", EVENTS),
    "v2 in a container": ("0::/\n", "memory.events", EVENTS),
    "v2, the host's path": ("0::/kubepods/pod1/c1\n", "memory.events", EVENTS),
    "v1": (
        "12:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/job\n",
        "memory/job/memory.oom_control",
        OOM_CONTROL,
    ),
    "v1 in a container": ("4:memory:/docker/c1\n", "memory/memory.oom_control", OOM_CONTROL),
    "hybrid": ("4:memory:/job\n0::/job\n", "memory/job/memory.oom_control", OOM_CONTROL),
}


@pytest.fixture(params=list(PLACES.values()), ids=list(PLACES))
def cgroup(request: pytest.FixtureRequest, tmp_path: Path) -> FakeCgroup:
    return FakeCgroup(tmp_path, *request.param)


def test_a_kill_is_reported_once(cgroup: FakeCgroup) -> None:
    counter = cgroup.counter()
    assert not counter.has_killed()
    cgroup.kills(1)
    assert counter.has_killed()
    assert not counter.has_killed()
    cgroup.kills(3)
    assert counter.has_killed()


def test_kills_before_a_start_are_not_attributed_to_its_workers(cgroup: FakeCgroup) -> None:
    cgroup.kills(5)
    counter = cgroup.counter()
    assert not counter.has_killed()
    cgroup.kills(6)
    counter.mark()
    assert not counter.has_killed()


@pytest.mark.parametrize(
    ("membership", "file", "text"),
    [
        ("", "memory.events", EVENTS),
        ("garbage\n::\n", "memory.events", "oom_kill many\n"),
        ("0::/job\n", "job/memory.current", "12"),
        # Linux before 4.13 counts no kills, and failcnt does not count them.
        ("4:memory:/job\n", "memory/job/memory.oom_control", "under_oom 0\n"),
    ],
)
def test_a_kernel_without_a_kill_counter_is_no_evidence(
    tmp_path: Path, membership: str, file: str, text: str
) -> None:
    cgroup = FakeCgroup(tmp_path, membership, file, text)
    counter = cgroup.counter()
    cgroup.kills(1)
    assert not counter.has_killed()


def test_a_missing_cgroup_is_no_evidence(tmp_path: Path) -> None:
    assert not OomKillCounter(tmp_path / "none", tmp_path / "neither").has_killed()


# ── the agent's workers ────────────────────────────────────────────────────────────────────


class Agent:
    """An agent with a worker in its training loop."""

    def __init__(self, folder: Path) -> None:
        self.cgroup = FakeCgroup(folder, *PLACES["v2"])
        self.context = Context()
        self.workers = Workers(cast(NodeContext, self.context), self.cgroup.counter())
        self.worker = Worker(pid=1 << 22, local_rank=0, token=1)
        self.workers.on_message(
            self.worker, ClientHandshakeRequest(version=1, pid=1 << 22, local_rank=0, library="1")
        )
        self.workers.on_message(self.worker, Ready())

    def ends(self, code: int | None, signum: int | None, bye: Exiting | None = None) -> None:
        self.workers.on_ended(self.worker, WorkerDeath(self.worker.pid, code, signum, bye))


def test_a_worker_killed_by_the_oom_killer_is_reported_as_such(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.cgroup.kills(1)
    agent.ends(None, signal.SIGKILL)
    node = agent.context.status.node
    assert node.failure_is_oom_kill and node.failure_exit_code == -9
    assert "SIGKILL: the kernel killed it because the memory limit" in (node.failure or "")
    verdict = judge_failure(
        FailureFacts(text=node.failure, exit_code=-9, is_oom_kill=node.failure_is_oom_kill)
    )
    assert (verdict.rule, verdict.confidence.value) == ("host-out-of-memory", "high")


@pytest.mark.parametrize(
    ("kills", "code", "signum"),
    [(0, None, signal.SIGKILL), (1, None, signal.SIGTERM), (1, 1, None)],
    ids=["killed by somebody", "another signal", "an exit code"],
)
def test_other_exits_are_not_reported_as_oom_kills(
    tmp_path: Path, kills: int, code: int | None, signum: int | None
) -> None:
    agent = Agent(tmp_path)
    agent.cgroup.kills(kills)
    agent.ends(code, signum)
    node = agent.context.status.node
    assert node.failure_exit_code and not node.failure_is_oom_kill
    assert "memory limit" not in (node.failure or "")


def test_a_worker_killed_as_hung_is_not_reported_as_an_oom_kill(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.cgroup.kills(1)
    agent.workers.is_hung(agent.worker.pid, "rank 0 hangs")
    agent.ends(None, signal.SIGKILL)
    node = agent.context.status.node
    assert (node.failure, node.failure_is_oom_kill) == ("hang: rank 0 hangs", False)


@pytest.mark.parametrize("kills", [0, 1])
def test_a_killed_data_worker_is_an_oom_kill_only_if_the_kernel_has_counted_one(
    tmp_path: Path, kills: int
) -> None:
    error = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. "
    agent = Agent(tmp_path)
    agent.cgroup.kills(kills)
    agent.workers.on_message(agent.worker, Exiting(clean=False, error=error))
    node = agent.context.status.node
    assert node.failure_is_oom_kill is bool(kills)
    assert error in (node.failure or "")


def test_a_worker_reports_the_step_at_which_it_failed(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.ends(1, None, Exiting(clean=False, error="ValueError: boom", step=42))
    node = agent.context.status.node
    assert (node.failure, node.failure_step) == ("ValueError: boom", 42)
