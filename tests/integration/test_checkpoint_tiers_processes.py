"""Memory tiers with real processes: workers or a node are killed, and there is no disk."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints
from checkpoints.memory import (
    MemoryHost,
    Neighbours,
    PeerAddress,
    ReplicationOutcome,
    memory_roots,
    own_memory,
)
from checkpoints.tiers import TieredStorage
from elastic.wire.handshake import Credentials, SecretKey

KEY = SecretKey.generate()  # shared by forks of this process

PER_NODE = 2
ELEMENTS = 200_000  # of 8 bytes: large enough to be killed in the middle of a write
LONG_S = 60.0


def state(step: int) -> dict[str, Any]:
    """Every tensor encodes the step, so that a mixture is detected."""
    return {
        "weight": torch.full((ELEMENTS,), step),
        "bias": torch.full((7,), float(step)),
        "step": step,
    }


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory, if the machine provides one."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="test-tiers-", dir=parent))
    yield folder
    shutil.rmtree(folder)


@dataclass
class Process:
    """A fork of this warm process, with a pipe in each direction."""

    pid: int
    into: int
    out: int
    _lines: list[str] = field(default_factory=list)
    _rest: str = ""

    def say(self, text: str) -> None:
        os.write(self.into, f"{text}\n".encode())

    def hear(self, wanted: str) -> str:
        """The first line with this prefix."""
        by_s = time.monotonic() + LONG_S
        while True:
            for line in self._lines:
                if line.startswith(wanted):
                    self._lines.remove(line)
                    return line
            left_s = by_s - time.monotonic()
            assert left_s > 0 and select.select([self.out], [], [], left_s)[0], wanted
            data = os.read(self.out, 65536)
            assert data, f"it ended before it said {wanted!r}"
            *lines, self._rest = (self._rest + data.decode()).split("\n")
            self._lines += lines

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.reap()

    def reap(self) -> None:
        os.waitpid(self.pid, 0)
        os.close(self.into)
        os.close(self.out)


def fork(work: Callable[[Iterator[str], Callable[[str], None]], None]) -> Process:
    child_in, into = os.pipe()
    out, child_out = os.pipe()
    pid = os.fork()
    if pid:
        os.close(child_in)
        os.close(child_out)
        return Process(pid, into, out)
    status = 1
    try:
        os.close(into)
        os.close(out)
        torch.set_num_threads(1)  # the parent's thread pool does not survive a fork
        with os.fdopen(child_in) as said:
            work(said, lambda text: (os.write(child_out, f"{text}\n".encode()), None)[1])
        status = 0
    finally:
        os._exit(status)


class Node:
    """An agent that hosts the memory, and workers that write into it."""

    def __init__(self, folder: Path, first_rank: int, world_size: int) -> None:
        self.folder, self.first_rank, self.world_size = folder, first_rank, world_size
        self.agent = fork(self._host)
        self.address = PeerAddress(**json.loads(self.agent.hear("{")))
        self.workers: list[Process] = []

    def start_workers(self) -> None:
        ranks = range(self.first_rank, self.first_rank + PER_NODE)
        self.workers = [fork(lambda i, o, r=rank: self._work(r, i, o)) for rank in ranks]  # type: ignore[misc]

    def tell_world(self, others: list[PeerAddress]) -> None:
        self.agent.say(json.dumps([asdict(other) for other in others]))
        self.agent.hear("world known")

    def kill_workers(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers = []

    def kill(self) -> None:
        self.kill_workers()
        self.agent.kill()
        shutil.rmtree(self.folder)  # a machine's memory is lost with it

    def _host(self, said: Iterator[str], tell: Callable[[str], None]) -> None:
        known = [Neighbours()]

        def told(outcome: ReplicationOutcome) -> None:
            tell(f"copied {outcome.name} {outcome.rank}" if not outcome.reason else outcome.reason)

        host = MemoryHost(
            self.folder,
            host="127.0.0.1",
            credentials=Credentials(key=lambda: KEY, identity=self.folder.name),
            neighbours=lambda: known[0],
            on_outcome=told,
        )
        address = PeerAddress(self.folder.name, "127.0.0.1", host.port, self.folder.name)
        tell(json.dumps(asdict(address)))
        # (Its pipe does not close: later forks also hold the other end.)
        for line in iter(lambda: next(said), "end\n"):
            peers = tuple(PeerAddress(**peer) for peer in json.loads(line))
            known[0] = Neighbours(peers, peers[0] if peers else None)
            host.refresh()
            tell("world known")
        host.close()

    def _work(self, rank: int, said: Iterator[str], tell: Callable[[str], None]) -> None:
        world = checkpoints.WriterGroup(nonce="aa", rank=rank, size=self.world_size)
        with checkpoints.Engine(own_memory(self.folder)) as engine:
            for line in said:
                step = int(line)
                outcome = engine.save_async(state(step), step=step, world=world).wait(LONG_S)
                assert outcome is not None and outcome.status is checkpoints.SaveStatus.COMMITTED
                tell(f"saved {step}")


class Job:
    def __init__(self, memory: Path, size: int) -> None:
        self.nodes = [
            Node(memory / f"node-{i}", i * PER_NODE, size * PER_NODE) for i in range(size)
        ]
        self.form(self.nodes)

    def form(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        for i, node in enumerate(nodes):
            node.tell_world([other.address for other in nodes[i + 1 :] + nodes[:i]])

    @property
    def workers(self) -> list[Process]:
        return [worker for node in self.nodes for worker in node.workers]

    def save(self, step: int) -> None:
        for worker in self.workers:
            worker.say(str(step))
        for worker in self.workers:
            worker.hear(f"saved {step}")

    def close(self) -> None:
        for node in self.nodes:
            node.kill_workers()
            node.agent.say("end")
            node.agent.reap()


def assert_restores(node: Node, at_least: int) -> int:
    """Restarted workers on this node restore that step without a disk."""
    tiers = TieredStorage(memory_roots(node.folder))
    found = checkpoints.latest(tiers).checkpoint
    assert found is not None and found.step >= at_least
    loaded = checkpoints.load(tiers, found.name).state
    expected = state(found.step)
    assert loaded["step"] == found.step
    assert torch.equal(loaded["weight"], expected["weight"])
    assert torch.equal(loaded["bias"], expected["bias"])
    return found.step


@pytest.mark.slow
def test_workers_killed_at_any_time_restore_from_the_memory_of_their_nodes(memory: Path) -> None:
    chance = random.Random(11)
    job = Job(memory, 2)
    step = 0
    try:
        for _ in range(6):
            for node in job.nodes:
                node.start_workers()
            for next_step in range(step + 1, step + 4):
                job.save(next_step)
            for worker in job.workers:
                worker.say(str(step + 4))
            time.sleep(chance.uniform(0, 0.01))  # the time of the kill is random
            for node in job.nodes:
                node.kill_workers()
            found = {assert_restores(node, step + 3) for node in job.nodes}
            assert len(found) == 1  # all nodes see the same step
            step = max(found)
    finally:
        job.close()
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_lost_node_is_restored_from_the_memory_of_its_neighbour(memory: Path, lost: int) -> None:
    job = Job(memory, 3)
    try:
        for node in job.nodes:
            node.start_workers()
        for step in (1, 2):
            job.save(step)
        for node in job.nodes:
            for rank in range(node.first_rank, node.first_rank + PER_NODE):
                node.agent.hear(f"copied step-000000002.g0.aa {rank}")
        gone = job.nodes[lost]
        for worker in job.workers:  # it dies while all nodes save the next checkpoint
            worker.say("3")
        gone.kill()
        rest = [node for node in job.nodes if node is not gone]
        for node in rest:
            node.kill_workers()
        job.form(rest)
        assert len({assert_restores(node, 2) for node in rest}) == 1
    finally:
        job.close()


def test_the_loss_of_two_neighbours_falls_back_to_the_disk(memory: Path) -> None:
    """The memory tier tolerates the loss of one node; otherwise the newest complete checkpoint is
    on disk.
    """
    job = Job(memory, 3)
    disk = memory / "disk"
    checkpoints.save(disk, state(1), step=1, nonce="aa")
    try:
        for node in job.nodes:
            node.start_workers()
        job.save(2)
        for node in job.nodes:
            for rank in range(node.first_rank, node.first_rank + PER_NODE):
                node.agent.hear(f"copied step-000000002.g0.aa {rank}")
        for node in job.nodes[:2]:
            node.kill()
        job.form(job.nodes[2:])
        found = checkpoints.latest(
            TieredStorage([*memory_roots(job.nodes[0].folder), disk])
        ).checkpoint
        assert found is not None and found.step == 1
    finally:
        job.close()
