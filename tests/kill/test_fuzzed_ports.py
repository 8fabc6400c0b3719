"""The ports of a job are attacked while it trains, loses a node and gains another one."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hostile import Attacker, Port, from_many_addresses, unix
from raw_peer import prove
from training_job import SCRIPTS, TrainingJob, Workload, train_undisturbed

from elastic.agent.node import LIVENESS, RunSecret
from elastic.membership.records import Node, decode
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.node import LocalNode
from elastic.testing.waiting import PATIENCE_S
from elastic.wire.base import AuthenticationError
from elastic.wire.handshake import SecretKey

pytestmark = pytest.mark.slow

SCRIPT = SCRIPTS / "phases.py"
WORKLOAD = Workload(samples=250, epochs=6, step_s=0.8)
FRAMES = 1500  # hostile connections before the first event
# The normal fluctuation in threads and descriptors of a node's agent and worker.
SLACK = 12


class Attack:
    """Attacks all listeners of a job at random, from a separate thread."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._attacker = Attacker(7)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="attack")
        self.ports: list[Port] = []
        self.seen: set[str] = set()

    def __enter__(self) -> Attack:
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def sent(self) -> int:
        return self._attacker.sent

    def look(self) -> None:
        """The current listeners of the job."""
        self.ports = list(self._ports())
        self.seen.update(port.kind for port in self.ports)

    def _ports(self) -> Iterator[Port]:
        job, pick = self._job, random.Random(1)
        numbers: list[tuple[str, int]] = []
        for entry in job.store.list(job.keys.nodes).entries:
            node = decode(Node, entry.key, entry.value)
            numbers += [("liveness", node.liveness_port), ("memory", node.memory_port)]
        if (world := job.world()) is not None:
            numbers.append(("store", world.store_port))
        numbers += [("health", int(e["port"])) for e in job.journaled("health-served")]
        for kind, number in numbers:
            yield Port(kind, lambda number=number: from_many_addresses(number, pick))  # type: ignore[misc]
        for node_ in job.running:
            for worker in node_.workers().values():
                path = psutil.Process(worker.pid).environ()["ELASTIC_LINK"]
                yield Port("link", lambda path=path: unix(path))  # type: ignore[misc]

    def _run(self) -> None:
        while not self._stop.is_set():
            self._attacker.attack(self._attacker.random.choice(self.ports))


def cost(nodes: list[LocalNode]) -> dict[int, tuple[int, int]]:
    """Threads and descriptors of agents and workers, by pid."""
    pids = [node.pid for node in nodes] + [w.pid for n in nodes for w in n.workers().values()]
    processes = [psutil.Process(pid) for pid in pids]
    return {process.pid: (process.num_threads(), process.num_fds()) for process in processes}


def test_a_job_continues_training_while_all_its_ports_are_attacked(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    undisturbed = train_undisturbed(tmp_path / "alone", WORKLOAD, SCRIPT)
    with TrainingJob(
        [etcd.endpoint],
        tmp_path / "job",
        script=SCRIPT,
        workload=WORKLOAD,
        min_nodes=2,
        max_nodes=3,
        conf={"health_port": 0},
    ) as job:
        nodes = job.bring_to(3)
        before, generation = cost(nodes), job.generation()
        pids = {node.name: node.workers()[0].pid for node in nodes}
        for node in nodes:
            job.wait_event("health-served", lambda e, name=node.name: e["node"] == name)  # type: ignore[misc]
        with Attack(job) as attack:
            assert attack.seen == {"liveness", "memory", "store", "health", "link"}
            step = job.ledger().last_step
            job.wait_for(lambda: attack.sent >= FRAMES, 2 * PATIENCE_S, "the attack")
            job.wait_step(step + 5)
            # No node was considered lost, and nothing was restarted.
            assert job.generation() == generation
            assert {n.name: n.workers()[0].pid for n in nodes} == pids

            job.node_of_rank(1).kill()
            job.wait_training(nodes=2, after_generation=generation)
            attack.look()
            job.bring_to(3)
            attack.look()
        _strangers_are_told_nothing(job)
        survivors = [node for node in nodes if node.running]
        job.wait_progress()
        job.wait_for(
            lambda: _is_flat(before, survivors) or None, PATIENCE_S, "what it cost is given back"
        )
        _the_log_is_not_flooded(job)
        job.assert_finishes_whole(undisturbed)


def _is_flat(before: dict[int, tuple[int, int]], nodes: list[LocalNode]) -> bool:
    now = cost(nodes)
    return all(
        threads <= before[pid][0] + SLACK and descriptors <= before[pid][1] + SLACK
        for pid, (threads, descriptors) in now.items()
    )


def _strangers_are_told_nothing(job: TrainingJob) -> None:
    """Clients that can read the run's secret in etcd are trusted."""
    entries = job.store.list(job.keys.nodes).entries
    nodes = [decode(Node, entry.key, entry.value) for entry in entries]
    alive = {running.name for running in job.running}  # the lease of a dead node remains
    node = next(node for node in nodes if node.name in alive)
    pick = random.Random(2)
    with from_many_addresses(node.liveness_port, pick) as sock, pytest.raises(AuthenticationError):
        prove(sock, SecretKey.generate(), "n1")
    with from_many_addresses(node.liveness_port, pick) as sock:
        key = RunSecret.obtain(job.store, job.keys).key(LIVENESS)
        assert prove(sock, key, "n1") == node.node_id


def _the_log_is_not_flooded(job: TrainingJob) -> None:
    for node in job.nodes:
        lines = [line for line in node.log_text().splitlines() if "is disconnected:" in line]
        assert len(lines) < 100, lines[:20]
