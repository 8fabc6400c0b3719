"""How long a job pauses when a worker is alive and makes no progress.

    python benchmarks/hang.py                       a table
    python benchmarks/hang.py --json                one JSON object (measurement.py)
    python benchmarks/hang.py --times 1 --torchft 0 --torchft-tight 0    two minutes of it
    python benchmarks/hang.py --json > benchmarks/results/hang.json      what is published

Three nodes on this machine, one worker each, gloo, min 2, max 3. The script is
benchmarks/scripts/hanging.py: 1.05 million parameters, AdamW, steps of about 20 ms with a barrier
in each. Once with all settings at their defaults but ``quarantine_s`` and ``failure_budget`` (a
node here hangs more often than any node should), once with the shortest ``hang_timeout_s``.

How each number is measured:

stopped worker, endless loop, skipped collective
    SIGSTOP of a worker; a worker that loops in its forward pass; one that leaves a barrier out. The
    longest time between two consecutive completed steps of any survivor, by the ledger.
stopped node
    SIGSTOP of an agent and its worker at once: no process of that node can notice it, so its lease
    (4 s) decides.
cost per step, cost of a look
    In this process: what a step writes to its page (two batches, three waits, an optimizer); what a
    tick of the agent's thread takes for one worker, five times a second.
torchft
    SIGSTOP of the worker of one of three replicas (benchmarks/recovery_torchft.py: an environment
    of its own, made at the first use), with its default times and the shortest that train here; the
    longest time between two committed steps of a survivor. Loops and skipped collectives are left
    out: there the heartbeats go on, and only the timeout of a collective (60 s) ends the wait.

Time that a rank waits for a core is not counted as a hang, so an endless loop on a busy machine
takes longer to be found: with a tenth of a core, ten times as long. Measure on a machine that is
quiet. With its defaults this takes about eight minutes.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import recovery_torchft as torchft
from measurement import Report, Row

from elastic.hangs.page import (
    CHECKPOINT,
    COMPUTE,
    DATA,
    OPTIMIZER,
    BudgetPolicy,
    Phase,
    PhaseRecorder,
)
from elastic.hangs.stacks import StackSource
from elastic.hangs.watch import HangWatch
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.cluster import ClusterTimeout, LocalCluster
from elastic.testing.node import TorchrunOptions
from elastic.tuning.intervals import HANG_TICK_S, MIN_HANG_TIMEOUT_S

SCRIPT = Path(__file__).parent / "scripts" / "hanging.py"
CASES = ("stopped worker", "endless loop", "skipped collective", "stopped node")
ORDERS = {"endless loop": "loop", "skipped collective": "skip"}
CAP_S = 120.0
WARM_UP = 30  # steps, before which a world is given more time
SETTLE_S = 0.7
SEED = 7


class HangingJob:
    """Three nodes that train, and how long each hang stops them."""

    def __init__(self, cluster: LocalCluster, rng: random.Random) -> None:
        self.cluster = cluster
        self.rng = rng
        self.pauses_s: dict[str, list[float]] = defaultdict(list)
        self.failed: dict[str, int] = defaultdict(int)

    def whole(self) -> None:
        """Bring the job to three nodes that train."""
        for _ in range(3 - len(self.cluster.running)):
            self.cluster.start_node()

        def is_whole() -> bool:
            generation, names = self.cluster.training_nodes()
            return generation == self.cluster.generation() and len(names) == 3

        self.cluster.wait_for(is_whole, CAP_S, "three nodes in the newest world")
        self.cluster.wait_progress(WARM_UP, CAP_S)
        time.sleep(self.rng.random() * 0.2)

    def hurt(self, case: str) -> None:
        """One hang of a random node."""
        self.whole()
        cluster, generation, began_s = self.cluster, self.cluster.generation(), time.time()
        victim = self.rng.choice(cluster.running)
        if case == "stopped worker":
            os.kill(victim.workers()[0].pid, signal.SIGSTOP)
        elif case == "stopped node":
            victim.pause()
        else:
            staged = cluster.folder / "staged"
            staged.write_text(victim.name)
            staged.rename(cluster.folder / f"hang-{ORDERS[case]}")
        others = {node.name for node in cluster.running} - {victim.name}
        try:
            cluster.wait_for(lambda: cluster.training_nodes()[0] > generation, CAP_S, case)
        except ClusterTimeout as error:
            self.failed[case] += 1
            say(f"{case}: {error}")
            victim.kill()  # the next case finds three nodes again
            return
        time.sleep(SETTLE_S)
        self.pauses_s[case].append(self._pause_s(others, began_s))
        say(f"{case}: {self.pauses_s[case][-1]:.2f} s")
        if case == "stopped node":
            victim.kill()

    def _pause_s(self, names: set[str], since_s: float) -> float:
        longest_s = 0.0
        steps = self.cluster.ledger().steps
        for name in names:
            times = sorted(s.time_s for s in steps if s.node == name)
            gaps = [b - a for a, b in itertools.pairwise(times) if b > since_s]
            longest_s = max([longest_s, *gaps])
        return longest_s


def measure(times: int, conf: Mapping[str, object], subject: str, seed: int) -> list[Row]:
    """All cases ``times`` times, in a random order."""
    rng = random.Random(seed)
    settings = {"failure_budget": 1000, "quarantine_s": 0.5, **conf}
    with EmbeddedEtcd() as etcd, tempfile.TemporaryDirectory() as folder:
        arguments = [f"--folder={folder}"]
        with LocalCluster(
            [etcd.endpoint],
            SCRIPT,
            Path(folder),
            TorchrunOptions(min_nodes=2, max_nodes=3, conf=settings),
            args=arguments,
        ) as cluster:
            job = HangingJob(cluster, rng)
            events = list(CASES) * times
            rng.shuffle(events)
            for case in events:
                job.hurt(case)
    return [Row(c, subject, "s", tuple(job.pauses_s[c]), job.failed[c]) for c in CASES]


def measure_torchft(stops: int, tight_stops: int, rng: random.Random) -> list[Row]:
    """A stopped worker under torchft; nothing where it cannot run."""
    rows: list[Row] = []
    try:
        python, version = torchft.prepare(say)
        for settings, times in ((torchft.DEFAULT, stops), (torchft.TIGHT, tight_stops)):
            if times:
                pauses_s, failed = torchft.measure_stops(python, settings, times, rng, say)
                subject = f"{settings.name} ({version})"
                rows.append(Row("stopped worker", subject, "s", tuple(pauses_s), failed))
    except torchft.Unavailable as error:
        say(f"torchft cannot be measured here: {error}")
    return rows


def say(text: str) -> None:
    """Progress, apart from the result on stdout."""
    print(text, file=sys.stderr, flush=True)


def cost_of_step(steps: int = 20_000) -> list[float]:
    """Seconds per step, of several runs."""
    recorder = PhaseRecorder()
    recorder.start()
    script = Phase.SCRIPT

    def step(number: int) -> None:
        recorder.begin_step(number)
        recorder.enter(COMPUTE)
        for collective in range(3):
            recorder.end_wait(recorder.begin_wait(number + collective, 1))
        recorder.enter(OPTIMIZER)
        recorder.enter(script)
        recorder.committed(number)
        for _ in range(2):
            recorder.enter(recorder.enter(DATA))
        recorder.enter(CHECKPOINT)

    return [_timed(step, steps // 10) for _ in range(10)]


def cost_of_look(looks: int = 2000) -> list[float]:
    """Seconds of CPU per tick, of several runs."""
    recorder = PhaseRecorder()
    watch = HangWatch(
        policy=BudgetPolicy(),
        node="node",
        tick_s=HANG_TICK_S,
        on_facts=lambda generation, ranks: None,
        on_stopped=lambda worker, facts, stopped_s: None,
        on_error=lambda error: None,
    )
    watch.add(os.getpid(), 0, recorder.start(), StackSource(-1, 0))
    watch.post(lambda: None)
    watch.run_tasks()
    return [_timed(lambda number: watch.tick(), looks // 10) for _ in range(10)]


def _timed(work, times: int) -> float:  # type: ignore[no-untyped-def]
    began_s = time.thread_time()
    for number in range(times):
        work(number)
    return (time.thread_time() - began_s) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the object instead of a table")
    parser.add_argument("--times", type=int, default=3, help="of each case (default: 3)")
    parser.add_argument("--torchft", type=int, default=1, help="stops with its defaults; 0: none")
    parser.add_argument("--torchft-tight", type=int, default=3, help="stops, tightest settings")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    rows: list[Row] = []
    try:
        measure_all(options, rows)
    finally:  # what was measured until a failure has taken long enough
        Report("hang", options.seed, tuple(rows)).show(as_json=options.json)


def measure_all(options: argparse.Namespace, rows: list[Row]) -> None:
    """Add the requested measurements to ``rows``."""
    micro = 1e6
    rows.append(Row("cost per step", "worker", "us", tuple(s * micro for s in cost_of_step())))
    rows.append(Row("cost of a look", "agent", "us", tuple(s * micro for s in cost_of_look())))
    shortest = {"hang_timeout_s": MIN_HANG_TIMEOUT_S}
    for conf in ({}, shortest):
        subject = ", ".join(f"{k}={v:g}" for k, v in conf.items()) or "defaults"
        say(subject)
        rows += measure(options.times, conf, subject, options.seed)
    if options.torchft or options.torchft_tight:
        rng = random.Random(options.seed)
        rows += measure_torchft(options.torchft, options.torchft_tight, rng)


if __name__ == "__main__":
    main()
