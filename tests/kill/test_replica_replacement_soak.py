"""Ranks of a replica die again while they are being replaced, at random times.

Each round kills a rank of a replica and, up to 1.5 s after its replacement has begun, one or both
of the replacement processes: before, while and after they meet, receive the state, and train.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_job import SCRIPTS, TrainingJob, Workload

from elastic.membership.records import Node, decode
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.processes import send
from elastic.testing.waiting import PATIENCE_S

ROUNDS = int(os.environ.get("ELASTIC_SOAK_KILLS", "100"))
SEED = int(os.environ.get("ELASTIC_SOAK_SEED", "0"))
EXAMPLE = Path(__file__).parents[2] / "examples" / "hsdp.py"
REPLACED_WITHIN_S = 60.0
LATEST_S = 1.5
NPROC = 4
WORKLOAD = Workload(
    samples=110,
    batch=22,
    epochs=100_000,
    step_s=0.3,
    save_every=5,
    extra=(f"--example={EXAMPLE}", "--width=8", "--layers=1"),
)

pytestmark = [pytest.mark.soak, pytest.mark.timeout(ROUNDS * 4 * REPLACED_WITHIN_S)]


@pytest.fixture
def job(etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[TrainingJob]:
    with TrainingJob(
        [etcd.endpoint],
        tmp_path,
        script=SCRIPTS / "paced_run.py",
        workload=WORKLOAD,
        nproc=NPROC,
        max_nodes=1,
        max_restarts=10 * ROUNDS,
    ) as job:
        yield job


def settled(job: TrainingJob, after_generation: int, dead: set[int]) -> int | None:
    """A later generation in which all workers of the node run, without any of ``dead``. (Processes
    are checked first: they are replaced once the node's record shows it.)
    """
    now = pids(job)
    if len(now) < NPROC or dead & set(now.values()):
        return None
    entries = job.store.list(job.keys.nodes).entries
    nodes = [decode(Node, entry.key, entry.value) for entry in entries]
    running = nodes[0].running if nodes else None
    if running is None or not nodes[0].in_process or running.generation <= after_generation:
        return None
    return running.generation


def pids(job: TrainingJob) -> dict[int, int]:
    return {rank: worker.pid for rank, worker in job.running[0].workers().items()}


class Round:
    """Kills ranks of one replica, and records their processes."""

    def __init__(self, job: TrainingJob, rng: random.Random, name: str) -> None:
        self._job = job
        self._rng = rng
        self._replica = rng.choice([(0, 1), (2, 3)])
        self._before = pids(job)
        self._told = [name]
        self._since_s = time.monotonic()
        self.dead: set[int] = set()

    def __str__(self) -> str:
        return ", ".join(self._told)

    def kill(self) -> None:
        """Kill the newest process of one rank of the replica, or of both."""
        first, second = self._replica
        ranks = self._rng.choice([[first], [second], [first, second]])
        # From the journal, which is faster than listing all processes: a replacement can be killed
        # before it has connected to its agent.
        started = self._job.journaled("worker-replaced", since_s=self._since_s)
        now = {**self._before, **{event["local_rank"]: event["pid"] for event in started}}
        self._told.append(f"kill {ranks}")
        for pid in {now[rank] for rank in ranks} - self.dead:
            self.dead.add(pid)
            send(pid, signal.SIGKILL)

    def pause(self) -> None:
        """Sleep for a random time."""
        pause_s = self._rng.uniform(0, LATEST_S)
        self._told.append(f"{pause_s:.2f} s")
        time.sleep(pause_s)

    @property
    def has_kept_others(self) -> bool:
        """Whether the other replica's processes are alive."""
        now = pids(self._job)
        return all(now[r] == pid for r, pid in self._before.items() if r not in self._replica)


def test_replacements_killed_at_random_times_are_replaced(job: TrainingJob) -> None:
    rng = random.Random(SEED)
    job.start_nodes(1)
    generation = job.wait_for(lambda: settled(job, 0, set()), PATIENCE_S, "the first world")
    for number in range(ROUNDS):
        kills, since_s = Round(job, rng, f"round {number}"), time.monotonic()
        kills.kill()
        job.wait_event("worker-replaced", since_s=since_s)
        for _ in range(rng.choice([1, 1, 2])):
            kills.pause()
            kills.kill()
        generation = job.wait_for(
            lambda seen=generation, dead=kills.dead: settled(job, seen, dead),  # type: ignore[misc]
            REPLACED_WITHIN_S,
            f"{kills}",
        )
        assert kills.has_kept_others, f"{kills}"
