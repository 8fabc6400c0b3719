"""What a change of the world costs in in-process mode, and what the harness costs in between.

    python benchmarks/recovery.py                       a table
    python benchmarks/recovery.py --json                the object of DESIGN section 10
    python benchmarks/recovery.py --kills 3 --peers 0 --steady 1      less of it

Three nodes on this machine, one worker each, gloo, min 1, max 3, all settings at their defaults
but ``cool_down_s=0.5``: a node here dies more often than any node should. The script is
benchmarks/scripts/mlp.py: 1.05 million parameters, AdamW, steps of about 20 ms of which 15 are
sleep. One job lives through all kills; each comes at a random moment once three nodes train.

How each number is measured:

kill …, leave
    SIGKILL (leave: SIGTERM to the agent). The longest time between two consecutive completed steps
    of any survivor that ends after it and before the next event. Completed steps are the lines of
    the ledger, written by each worker with the wall clock of the one machine.
join
    The same, around the world with the newcomer.
… with 2 data workers
    The same with ``DataLoader(num_workers=2)`` in every rank.
floor
    Two processes destroy a group, build another one at a store, and initialise DDP over the same
    model again, with nothing to decide: from the first to the last of it on the slower rank.
steady
    ``ratio``: the step time of the script over that of plain DDP on the same model and data, both
    under torchrun with three workers on one node, alternated. And the difference in CPU time of
    rank 0 per step. Both without a ledger.
torchrun-c10d
    The death of a node under torchrun's default backend, as benchmarks/restart.py measures it.

torchft is not measured here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measurement import Report, Row
from restart import measure_c10d, say

from elastic.coordination.embedded import EmbeddedEtcd
from elastic.testing.cluster import ClusterTimeout, LocalCluster
from elastic.testing.node import LocalNode

SCRIPT = Path(__file__).parent / "scripts" / "mlp.py"
KILLS = ("kill worker", "kill agent", "kill node", "kill leader node", "kill rank 0 node", "leave")
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
            victim.kill_worker()
        elif case == "kill agent":
            victim.kill_agent()
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
def a_job(etcd: EmbeddedEtcd, loader_workers: int, rng: random.Random) -> Iterator[Job]:
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    suffix = f" with {loader_workers} data workers" if loader_workers else ""
    try:
        with LocalCluster(
            [etcd.endpoint],
            SCRIPT,
            folder,
            args=[f"--loader-workers={loader_workers}", f"--stop={folder / 'stop'}"],
            min_nodes=1,
            max_nodes=3,
            conf={"cool_down_s": 0.5, "failure_budget": 100_000},
        ) as cluster:
            cluster.start_nodes(3)
            yield Job(cluster, suffix, rng)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure_kills(
    etcd: EmbeddedEtcd, kills: int, loader_workers: int, rng: random.Random
) -> list[Row]:
    """All cases of events, in a random order, in one job."""
    cases = [case for case in KILLS for _ in range(kills)]
    rng.shuffle(cases)
    with a_job(etcd, loader_workers, rng) as job:
        for number, case in enumerate(cases):
            job.hurt(case)
            took_s = job.samples[case + job.suffix][-1]
            say(f"{number + 1} of {len(cases)}: {case}{job.suffix}: {took_s:.3f} s")
        job.whole()
    names = [f"{case}{job.suffix}" for case in (*KILLS, "join")]
    return [Row(n, "elastic", "s", tuple(job.samples[n]), job.failed[n]) for n in names]


def measure_floor(rounds: int) -> Row:
    """Destroy, build, initialise DDP, without any coordination."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ports = [_free_port() for _ in range(rounds + 1)]
    workers = [context.Process(target=_floor, args=(rank, 2, ports, results)) for rank in range(2)]
    for worker in workers:
        worker.start()
    took = [results.get(timeout=120.0) for _ in workers]
    for worker in workers:
        worker.join()
    return Row("floor", "elastic", "s", tuple(max(pair) for pair in zip(*took, strict=True)))


def _floor(rank: int, size: int, ports: list[int], results: Any) -> None:
    import torch

    from elastic.training.wrap import ElasticDDP
    from elastic.worker.process_group import GroupSpec, ProcessGroup

    sys.path.insert(0, str(SCRIPT.parent))
    from mlp import network

    torch.set_num_threads(1)
    group, model = ProcessGroup(torch.device("cpu"), "gloo"), ElasticDDP(network())
    took = []
    for number, port in enumerate(ports):
        began = time.perf_counter()
        model.leave_world()
        group.destroy()
        spec = GroupSpec(
            generation=number,
            nonce=str(number),
            rank=rank,
            size=size,
            store_host="127.0.0.1",
            store_port=port,
        )
        group.build(spec, superseded=lambda: False, timeout_s=30.0)
        model.enter_world()
        took.append(time.perf_counter() - began)
        model.reduction.begin(0.5)
        model(torch.randn(16, 512)).sum().backward()
    results.put(took[1:])
    model.leave_world()
    group.destroy()


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def measure_steady(etcd: EmbeddedEtcd, rounds: int, steps: int) -> list[Row]:
    """Step times, alternated."""
    ratios, cpu = [], []
    for number in range(rounds):
        plain = timed_run(["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"], steps, "--plain")
        ours = timed_run(["--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoint}"], steps)
        ratios.append(ours["wall_s"] / plain["wall_s"])
        cpu.append((ours["cpu_s"] - plain["cpu_s"]) * 1e3)
        say(f"steady {number + 1} of {rounds}: ratio {ratios[-1]:.3f}, CPU {cpu[-1]:+.3f} ms")
    return [
        Row("steady", "elastic", "ratio", tuple(ratios)),
        Row("steady: CPU of a worker per step", "elastic", "ms", tuple(cpu)),
    ]


def timed_run(backend: list[str], steps: int, *arguments: str) -> dict[str, float]:
    """Three workers on one node; what rank 0 printed."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=3"),
        *backend,
        f"--rdzv-id=steady-{time.time_ns()}",
        *(str(SCRIPT), f"--steps={steps}", *arguments),
    ]
    own = {k: v for k, v in os.environ.items() if not k.startswith("ELASTIC_")}
    done = subprocess.run(
        command,
        env={**own, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300.0,
        check=True,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    result: dict[str, float] = json.loads(line)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the result as one object")
    parser.add_argument("--kills", type=int, default=30, help="of each case")
    parser.add_argument("--busy-kills", type=int, default=5, help="of each case, with data workers")
    parser.add_argument("--peers", type=int, default=2, help="runs with stock c10d; 0: none")
    parser.add_argument("--steady", type=int, default=5, help="alternated pairs of runs")
    parser.add_argument("--steps", type=int, default=400, help="of each steady run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    rng = random.Random(options.seed)
    rows: list[Row] = []
    with EmbeddedEtcd() as etcd:
        if options.steady:
            rows += measure_steady(etcd, options.steady, options.steps)
        rows.append(measure_floor(30))
        if options.kills:
            rows += measure_kills(etcd, options.kills, 0, rng)
        if options.busy_kills:
            rows += measure_kills(etcd, options.busy_kills, 2, rng)
    c10d = []
    for number in range(options.peers):
        c10d.append(measure_c10d(120.0).pause_s)
        say(f"torchrun c10d {number + 1} of {options.peers}: {c10d[-1]}")
    if c10d:
        known = tuple(pause for pause in c10d if pause is not None)
        rows.append(Row("kill node", "torchrun-c10d", "s", known, len(c10d) - len(known)))
    report = Report("recovery", options.seed, tuple(rows))
    if options.json:
        print(report.to_json())
    else:
        report.print_table()


if __name__ == "__main__":
    main()
