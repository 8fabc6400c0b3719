"""Nodes of replicas over two nodes die at random times, and others during the recovery."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_job import SCRIPTS, TrainingJob, Workload

from elastic.membership.records import Node, decode
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.node import LocalNode
from elastic.testing.waiting import PATIENCE_S

ROUNDS = int(os.environ.get("ELASTIC_SOAK_KILLS", "60"))
SEED = int(os.environ.get("ELASTIC_SOAK_SEED", "0"))
EXAMPLE = Path(__file__).parents[2] / "examples" / "hsdp.py"
NODES = 4
PER_REPLICA = 2
RECOVERED_WITHIN_S = 90.0  # a lease expires and new nodes start, on a busy machine
LATEST_S = 1.5
WORKLOAD = Workload(
    samples=110,
    batch=22,
    epochs=100_000,
    step_s=0.2,
    save_every=5,
    extra=(f"--example={EXAMPLE}", "--width=8", "--layers=1", "--precision=fp64"),
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(ROUNDS * 2 * RECOVERED_WITHIN_S)]


@pytest.fixture
def job(etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[TrainingJob]:
    with TrainingJob(
        [etcd.endpoint],
        tmp_path,
        script=SCRIPTS / "paced_run.py",
        workload=WORKLOAD,
        min_nodes=PER_REPLICA,
        max_nodes=NODES,
        conf={"replica_size": PER_REPLICA},
        max_restarts=10 * ROUNDS,
        env={"ELASTIC_LEDGER": str(tmp_path / "ledger")},
    ) as job:
        yield job


def pids(nodes: list[LocalNode]) -> dict[str, int]:
    return {node.name: worker.pid for node in nodes for worker in node.workers().values()}


def settled(job: TrainingJob, dead: set[int]) -> int | None:
    """The generation in which all nodes train, without any of the ``dead`` processes. (Processes
    are checked first: they are replaced once the records show it.)
    """
    now = pids(job.running)
    if len(now) < NODES or dead & set(now.values()):
        return None
    world = job.world()
    entries = job.store.list(job.keys.nodes).entries
    running = {n.name: n.running for n in (decode(Node, e.key, e.value) for e in entries)}
    if world is None or len(world.members) < NODES:
        return None
    in_it = [running.get(member.name) for member in world.members]
    is_entered = all(r is not None and r.generation == world.generation for r in in_it)
    return world.generation if is_entered and {m.name for m in world.members} == set(now) else None


class Round:
    """Kills workers, agents and whole nodes, and records the processes that ended with them."""

    def __init__(self, job: TrainingJob, rng: random.Random, name: str) -> None:
        self._job = job
        self._rng = rng
        self._told = [name]
        self._before = pids(job.running)
        world = job.world()
        assert world is not None
        names = [member.name for member in world.members]
        self._replicas = [set(names[:PER_REPLICA]), set(names[PER_REPLICA:])]
        self._victims: set[str] = set()
        self._left: list[LocalNode] = []
        self.dead: set[int] = set()

    def __str__(self) -> str:
        return ", ".join(self._told)

    def kill(self) -> None:
        """Kill a worker, an agent or a whole node; or a node leaves on a scheduler's request."""
        node = self._rng.choice(self._job.running)
        how = self._rng.choice(["kill_worker", "kill_agent", "kill", "terminate"])
        now = pids([node])
        if how == "kill_worker" and not now:
            how = "kill"  # it is between two workers
        self._told.append(f"{how} {node.name}")
        self._victims.add(node.name)
        self.dead |= set(now.values())
        getattr(node, how)()
        if how == "terminate":
            self._left.append(node)

    def wait_left(self) -> None:
        """Wait until the leaving nodes have exited."""
        for node in self._left:
            node.wait(RECOVERED_WITHIN_S)

    def pause(self) -> None:
        """Sleep for a random time."""
        pause_s = self._rng.uniform(0, LATEST_S)
        self._told.append(f"{pause_s:.2f} s")
        time.sleep(pause_s)

    def assert_unharmed_are_kept(self) -> None:
        """The processes of a replica without a killed node are alive."""
        now = pids(self._job.running)
        for replica in self._replicas:
            if not replica & self._victims:
                kept = {name: now.get(name) for name in replica}
                assert kept == {name: self._before[name] for name in replica}, f"{self}"


def test_all_nodes_resume_training_after_random_deaths(job: TrainingJob) -> None:
    rng = random.Random(SEED)
    job.start_nodes(NODES)
    job.wait_for(lambda: settled(job, set()), PATIENCE_S, "four nodes in a world")
    for number in range(ROUNDS):
        kills = Round(job, rng, f"round {number}")
        kills.pause()
        kills.kill()
        for _ in range(rng.choice([0, 1, 1, 2])):
            kills.pause()
            if rng.random() < 0.5:
                job.start_nodes(NODES - len(job.running))
            kills.kill()
        kills.wait_left()
        job.start_nodes(NODES - len(job.running))
        job.wait_for(
            lambda dead=kills.dead: settled(job, dead),  # type: ignore[misc]
            RECOVERED_WITHIN_S,
            f"{kills}",
        )
        kills.assert_unharmed_are_kept()
    ledger = job.ledger()
    ledger.assert_one_world_at_a_time()
    done = max(s.epoch for s in ledger.surviving)
    for epoch in range(done):
        c = ledger.coverage(WORKLOAD.samples, epoch)
        assert c.once == WORKLOAD.samples, (epoch, c, ledger.describe_lineage())
