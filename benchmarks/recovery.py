"""What a change of the world costs in in-process mode, and what the harness costs in between.

    python benchmarks/recovery.py                       a table
    python benchmarks/recovery.py --json                one JSON object (measurement.py)
    python benchmarks/recovery.py --kills 3 --peers 0 --steady 1      less of it

Three nodes on this machine, one worker each, gloo, min 1, max 3, all settings at their defaults
but ``quarantine_s=0.5``: a node here dies more often than any node should. The script is
benchmarks/scripts/mlp.py: 1.05 million parameters, AdamW, steps of about 20 ms of which 15 are
sleep. A job lives through 36 events; each comes at a random moment once three nodes train.

How each number is measured:

kill …, leave
    SIGKILL (leave: SIGTERM to the agent). The longest time between two consecutive completed steps
    of any survivor that ends after it and before the next event. Completed steps are the lines of
    the ledger, written by each worker with the wall clock of the one machine.
join
    The same, around the world with the joining node. ``state sent in a join``: the part of it in
    which a survivor gives the joining node the state (12.6 MB), by its event.
… with 2 data workers
    The same with ``DataLoader(num_workers=2)`` in every rank.
worker's death reported, workers gone after their agent
    In the same runs: from SIGKILL of a worker to its agent's event, on the monotonic clock; from
    SIGKILL of an agent to the end of its worker, looked for every 20 ms.
kill node without etcd
    A node is killed while etcd is away: from etcd's return to the first step of the survivors.
floor
    Two processes destroy a group, build another one at a store, and initialise DDP over the same
    model again, with nothing to decide: from the first to the last of it on the slower rank.
steady
    ``ratio``: the step time of the script over that of plain DDP on the same model and data, both
    under torchrun with three workers on one node, alternated. And the difference in CPU time of
    rank 0 per step. Both without a ledger. ``in turns``: both sides take turns of 40 steps within
    the same three processes (benchmarks/scripts/mlp_turns.py), means over the ranks: pairs of jobs
    differ by several times what is looked for. ``without a step``: what a worker's threads but
    gloo's take while nothing is trained; both sides of a turn carry it.
torchrun-c10d
    The death of a node under torchrun's default backend, as benchmarks/restart.py measures it.

torchft
    Complete replicas of the same model killed under torchft from PyPI, in a separate environment
    (benchmarks/recovery_torchft.py), with its default times and the shortest that train here.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import recovery_torchft as torchft
from measurement import Report, Row
from recovery_job import (
    CAP_S,
    KILLS,
    REPORTED,
    SCRIPT,
    SENT,
    TURNS_SCRIPT,
    WORKERS_GONE,
    Samples,
    a_job,
)
from restart import measure_c10d, say

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.cluster import ClusterTimeout
from elastic.testing.reaper import reap_descendants
from elastic.wire.handshake import SecretKey

EVENTS_A_JOB = 36  # what a job has written down is read again and again: no job grows old

C10D = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]


def measure_kills(
    etcd: EmbeddedEtcd, kills: int, loader_workers: int, rng: random.Random
) -> list[Row]:
    """All cases of events, in a random order, in as few jobs as are young."""
    cases = [case for case in KILLS for _ in range(kills)]
    rng.shuffle(cases)
    samples: Samples = defaultdict(list)
    failed: dict[str, int] = defaultdict(int)
    suffix = f" with {loader_workers} data workers" if loader_workers else ""
    for start in range(0, len(cases), EVENTS_A_JOB):
        with a_job(etcd, loader_workers, rng) as job:
            try:
                for number, case in enumerate(cases[start : start + EVENTS_A_JOB], start + 1):
                    job.hurt(case)
                    took_s = job.samples[case + suffix][-1]
                    say(f"{number} of {len(cases)}: {case}{suffix}: {took_s:.3f} s")
                job.whole()
            except ClusterTimeout as error:
                say(f"gave this job up: {error}")  # counted in job.failed
            job.samples[REPORTED] += job.reports()
            job.samples[f"{SENT}{job.suffix}"] += job.sendings()
            for name, values in job.samples.items():
                samples[name] += values
            for name, count in job.failed.items():
                failed[name] += count
    names = [f"{case}{suffix}" for case in (*KILLS, "join", SENT)]
    names += [] if loader_workers else [REPORTED, WORKERS_GONE]
    names += [f"start{suffix}"] if failed[f"start{suffix}"] else []  # of jobs that never trained
    return [Row(n, "elastic", "s", tuple(samples[n]), failed[n]) for n in names]


def measure_outages(etcd: EmbeddedEtcd, rounds: int, rng: random.Random) -> Row:
    """A node dies while etcd is away: from etcd's return to the survivors' next step."""
    took = []
    with a_job(etcd, 0, rng) as job:
        for number in range(rounds):
            generation = job.whole()
            etcd.kill()
            time.sleep(2.0 + rng.random())
            victim = rng.choice(job.cluster.running)
            victim.kill()
            time.sleep(2.0 + rng.random())
            etcd.start()
            back_s = time.time()
            job.cluster.wait_for(
                lambda generation=generation: len(job.stepped_after(generation)) == 2 or None,  # type: ignore[misc]
                CAP_S,
                "two survivors in a new world",
            )
            steps = job.cluster.ledger().steps
            took.append(min(s.time_s for s in steps if s.generation > generation) - back_s)
            say(f"outage {number + 1} of {rounds}: {took[-1]:.3f} s")
    return Row("kill node without etcd", "elastic", "s", tuple(took))


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

    from elastic.groups.group import ProcessGroup
    from elastic.link.link import GroupSpec
    from elastic.train.ddp import ElasticDDP

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
            store_key=SecretKey(bytes(32)).text,
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
        plain = timed_run(C10D, SCRIPT, f"--steps={steps}", "--plain")
        ours = timed_run(ours_at(etcd), SCRIPT, f"--steps={steps}")
        ratios.append(ours["wall_s"] / plain["wall_s"])
        cpu.append((ours["cpu_s"] - plain["cpu_s"]) * 1e3)
        say(f"steady {number + 1} of {rounds}: ratio {ratios[-1]:.3f}, CPU {cpu[-1]:+.3f} ms")
    return [
        Row("steady", "elastic", "ratio", tuple(ratios)),
        Row("steady: CPU of a worker per step", "elastic", "ms", tuple(cpu)),
    ]


def measure_turns(etcd: EmbeddedEtcd, rounds: int) -> list[Row]:
    """Step times within the same processes."""
    found = timed_run(
        ours_at(etcd), TURNS_SCRIPT, f"--rounds={rounds}", timeout_s=60.0 + 10 * rounds
    )
    cpu = "steady, in turns: CPU of a worker"
    rows = [
        Row("steady, in turns", "elastic", "ratio", tuple(found["ratio"])),
        Row(f"{cpu} per step", "elastic", "ms", tuple(found["cpu_ms"])),
        Row(f"{cpu} without a step", "elastic", "ms/s", tuple(found["idle_cpu_ms_per_s"])),
    ]
    for row in rows:
        say(f"{row.case}: {statistics.median(row.samples):.3f} {row.unit}")
    return rows


def ours_at(etcd: EmbeddedEtcd) -> list[str]:
    return ["--rdzv-backend=etcd-v3", f"--rdzv-endpoint={etcd.endpoint}"]


def timed_run(
    backend: list[str],
    script: Path,
    *arguments: str,
    workers: int = 3,
    timeout_s: float = 300.0,
) -> dict[str, Any]:
    """So many workers on one node; what rank 0 printed."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1"),
        f"--nproc-per-node={workers}",
        *backend,
        f"--rdzv-id=steady-{time.time_ns()}",
        *(str(script), *arguments),
    ]
    own = {k: v for k, v in os.environ.items() if not k.startswith("ELASTIC_")}
    done = subprocess.run(
        command,
        env={**own, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=True,
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    result: dict[str, Any] = json.loads(line)
    return result


def measure_torchft(options: argparse.Namespace, rng: random.Random) -> list[Row]:
    """The same model under torchft: kills, joins and steady state; nothing where it cannot run."""
    rows: list[Row] = []
    try:
        python, version = torchft.prepare(say)
        for settings, kills in (
            (torchft.DEFAULT, options.torchft),
            (torchft.TIGHT, options.torchft_tight),
        ):
            if not kills:
                continue
            events = torchft.measure_kills(python, settings, kills, rng, say)
            subject = f"{settings.name} ({version})"
            for case, took in (
                ("kill node", [e.kill_s for e in events]),
                ("join", [e.join_s for e in events if e.kill_s is not None]),
            ):
                known = tuple(t for t in took if t is not None)
                rows.append(Row(case, subject, "s", known, len(took) - len(known)))
        ratios = []
        for number in range(min(options.steady, 3)):
            plain = timed_run(C10D, SCRIPT, f"--steps={options.steps}", "--plain")
            theirs = torchft.timed_run(python, torchft.TIGHT, options.steps)
            ratios.append(theirs["wall_s"] / plain["wall_s"])
            say(f"torchft steady {number + 1}: ratio {ratios[-1]:.3f}")
        rows.append(Row("steady", f"{torchft.TIGHT.name} ({version})", "ratio", tuple(ratios)))
    except torchft.Unavailable as error:
        say(f"torchft cannot be measured here: {error}")
    return rows


def main() -> None:
    reap_descendants()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the result as one object")
    parser.add_argument("--kills", type=int, default=30, help="of each case")
    parser.add_argument("--busy-kills", type=int, default=5, help="of each case, with data workers")
    parser.add_argument("--outages", type=int, default=5, help="deaths while etcd is away")
    parser.add_argument("--peers", type=int, default=2, help="runs with stock c10d; 0: none")
    parser.add_argument("--torchft", type=int, default=10, help="kills with its defaults; 0: none")
    parser.add_argument("--torchft-tight", type=int, default=30, help="kills, tightest settings")
    parser.add_argument("--steady", type=int, default=5, help="alternated pairs of runs")
    parser.add_argument("--steps", type=int, default=400, help="of each steady run")
    parser.add_argument("--turns", type=int, default=100, help="of steady steps in one job")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    rows: list[Row] = []
    try:
        measure(options, rows)
    finally:  # what was measured until a failure has taken long enough
        Report("recovery", options.seed, tuple(rows)).show(as_json=options.json)


def measure(options: argparse.Namespace, rows: list[Row]) -> None:
    """Add the requested measurements to ``rows``."""
    rng = random.Random(options.seed)
    with EmbeddedEtcd() as etcd:
        if options.steady:
            rows += measure_steady(etcd, options.steady, options.steps)
        if options.turns:
            rows += measure_turns(etcd, options.turns)
        rows.append(measure_floor(30))
        if options.kills:
            rows += measure_kills(etcd, options.kills, 0, rng)
        if options.busy_kills:
            rows += measure_kills(etcd, options.busy_kills, 2, rng)
        if options.outages:
            rows.append(measure_outages(etcd, options.outages, rng))
    c10d = []
    for number in range(options.peers):
        c10d.append(measure_c10d(120.0).pause_s)
        say(f"torchrun c10d {number + 1} of {options.peers}: {c10d[-1]}")
    if c10d:
        known = tuple(pause for pause in c10d if pause is not None)
        rows.append(Row("kill node", "torchrun-c10d", "s", known, len(c10d) - len(known)))
    if options.torchft or options.torchft_tight:
        rows += measure_torchft(options, rng)


if __name__ == "__main__":
    main()
