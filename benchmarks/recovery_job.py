"""A job of three nodes that is hurt again and again, and what each change of its world cost."""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.cluster import ClusterTimeout, LocalCluster
from elastic.testing.journal import read_journal
from elastic.testing.node import LocalNode, TorchrunOptions

SCRIPT = Path(__file__).parent / "scripts" / "mlp.py"
TURNS_SCRIPT = SCRIPT.with_name("mlp_turns.py")
KILLS = ("kill worker", "kill agent", "kill node", "kill leader node", "kill rank 0 node", "leave")
REPORTED, WORKERS_GONE = "worker's death reported", "workers gone after their agent"
SENT = "state sent in a join"
SETTLE_S = 0.7  # of steps after an event, so that a pause shows
CAP_S = 60.0

Samples = dict[str, list[float]]


class Job:
    """Three nodes that train, and what their changes cost."""

    def __init__(self, cluster: LocalCluster, suffix: str, rng: random.Random) -> None:
        self.cluster = cluster
        self.suffix = suffix
        self.rng = rng
        self.samples: Samples = defaultdict(list)
        self.failed: dict[str, int] = defaultdict(int)
        self.killed: dict[int, float] = {}  # pid of a worker -> when, on the monotonic clock

    def whole(self) -> int:
        """Bring the job to three nodes; the pause of each that joins is a sample of `join`."""
        while True:
            generation, names = self.cluster.training_nodes()
            if generation == self.cluster.generation() and len(names) == 3:
                return generation
            began_s, before = time.time(), {n.name for n in self.cluster.running}
            if len(self.cluster.running) < 3:
                self.cluster.start_node()
            first = generation == 0
            try:
                self.cluster.wait_for(
                    lambda: (
                        (
                            len(self.cluster.training_nodes()[1]) == 3
                            and self.cluster.training_nodes()[0] == self.cluster.generation()
                        )
                        or len(self.cluster.running) < 3
                        or None
                    ),
                    CAP_S,
                    "three nodes in the newest world",
                )
            except ClusterTimeout:
                self.failed[("start" if first else "join") + self.suffix] += 1
                raise
            time.sleep(SETTLE_S)
            if not first and len(self.cluster.running) == 3:
                self.samples[f"join{self.suffix}"].append(self.pause(before & names, began_s))

    def pause(self, survivors: set[str], since_s: float) -> float:
        """The longest gap between two completed steps of a survivor that ends after a moment."""
        ledger = self.cluster.ledger()
        longest = 0.0
        for name in survivors:
            times = sorted(s.time_s for s in ledger.steps if s.node == name)
            gaps = [b - a for a, b in itertools.pairwise(times) if b > since_s]
            longest = max([longest, *gaps])
        return longest

    def hurt(self, case: str) -> None:
        """One event at a random moment."""
        generation = self.whole()
        time.sleep(self.rng.random() * 0.2)
        victim = self.victim(case)
        survivors = {n.name for n in self.cluster.running} - {victim.name}
        began_s = time.time()
        if case == "kill worker":
            self.killed[victim.kill_worker()] = time.monotonic()
        elif case == "kill agent":
            workers = [process.pid for process in victim.workers().values()]
            victim.kill_agent()
            self.samples[WORKERS_GONE].append(victim.wait_gone(workers, CAP_S))
        elif case == "leave":
            victim.terminate()
        else:
            victim.kill()
        try:
            self.cluster.wait_for(
                lambda: survivors <= self.stepped_after(generation) or None, CAP_S, case
            )
        except ClusterTimeout:
            self.failed[case + self.suffix] += 1
            raise
        time.sleep(SETTLE_S)
        self.samples[case + self.suffix].append(self.pause(survivors, began_s))

    def reports(self) -> list[float]:
        """How long after its death each killed worker was reported by its agent."""
        return [
            event["monotonic"] - self.killed[event["pid"]]
            for event in read_journal(self.cluster.folder / "journal")
            if event["event"] == "worker-died" and event["pid"] in self.killed
        ]

    def sendings(self) -> list[float]:
        """How long it took each time to give a joining node the state."""
        journal = read_journal(self.cluster.folder / "journal")
        return [event["duration_s"] for event in journal if event["event"] == "state-sent"]

    def stepped_after(self, generation: int) -> set[str]:
        return {s.node for s in self.cluster.ledger().steps if s.generation > generation}

    def victim(self, case: str) -> LocalNode:
        leader, first = self.cluster.leader(), self.cluster.node_of_rank(0)
        if case == "kill leader node":
            return leader
        if case == "kill rank 0 node":
            return first
        others = [n for n in self.cluster.running if n not in (leader, first)]
        return self.rng.choice(others or self.cluster.running)


@contextmanager
def a_job(
    etcd: EmbeddedEtcd,
    loader_workers: int,
    rng: random.Random,
    *,
    conf: Mapping[str, object] | None = None,
) -> Iterator[Job]:
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    suffix = f" with {loader_workers} data workers" if loader_workers else ""
    try:
        with LocalCluster(
            [etcd.endpoint],
            SCRIPT,
            folder,
            TorchrunOptions(conf={"quarantine_s": 0.5, "failure_budget": 100_000, **(conf or {})}),
            args=[f"--loader-workers={loader_workers}", f"--stop={folder / 'stop'}"],
        ) as cluster:
            cluster.start_nodes(3)
            yield Job(cluster, suffix, rng)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
