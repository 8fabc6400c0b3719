"""What the death of a node costs in restart mode: ours and stock torchrun's, in one run.

    python benchmarks/restart.py            a table
    python benchmarks/restart.py --json     one JSON object (measurement.py)
    python benchmarks/restart.py --kills 3 --peers 0      less of it

Three nodes on this machine, one worker each, gloo, min 2, max 3, all settings at their defaults
but ``--max-restarts=100`` (torchrun's default of 0 ends the survivors). The script is plain torch
(tests/kill/scripts/plain_ddp.py): each step is an all-reduce and about 20 ms of sleep, and every
fifth step is saved. Once step 20 is reached, every process of one node gets SIGKILL at once. One
embedded etcd serves all runs; each has its own run id.

How each number is measured:

pause
    The longest time between two consecutive completed steps of a survivor that contains the
    kill, the larger of the two survivors; completed steps are the lines the workers write.
    A run in which the survivors do not both complete a step after restarting, within ``--cap-s``
    of the kill, counts as failed and has no sample.
floor
    What no restart can avoid: right after each run, two workers of the same script are started
    at once without any agent, with a free port and the checkpoint that the survivors resumed
    from; from the first start to the moment when both have imported torch, built the group,
    built DDP and loaded.
pause / (1.5 floor + 2 s)
    The goal is at most 1. Both numbers of one quotient come from the same run.
world formation
    From the journals: the last node-arrived of the first world to the last world-entered.
finish
    From the last completed step of the job to the end of the last agent, after a node was lost.
    A run in which a survivor's agent does not end with 0 counts as failed.

With etcd-v3 the victim is in turn the node of rank 0, 1 and 2; the leader is among them. With
c10d it never is the node that hosts the store: its loss ends the job for certain.

Not measured: stock ``etcd-v2`` and ``etcd``. They need etcd's v2 API, which etcd 3.6 removed, and
the package python-etcd.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from measurement import Report, Row

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.cluster import ClusterTimeout, LocalCluster
from elastic.testing.ledger import RunLedger, read_ledger
from elastic.testing.node import LocalNode, TorchrunOptions
from elastic.testing.reaper import reap_descendants

SCRIPT = Path(__file__).parent.parent / "tests" / "kill" / "scripts" / "plain_ddp.py"
KILL_AT_STEP = 20
STEP_S = 0.02
ARGUMENTS = (
    "--samples=1000",
    "--batch=24",
    "--epochs=60",
    f"--step-s={STEP_S}",
    "--save-every=5",
)
PAUSE = "kill -9 of one node of three: pause"
FLOOR = "floor: start, import torch, build, load"
SHARE = "pause / (1.5 floor + 2 s)"
FORMATION = "world formation of 3 nodes"
FINISH = "last step to the end of all agents"


@dataclass(frozen=True)
class Run:
    """What one kill cost; None: it never came."""

    pause_s: float | None
    floor_s: float | None = None
    formation_s: float | None = None
    finish_s: float | None = None


def measure_elastic(etcd: EmbeddedEtcd, number: int, cap_s: float) -> Run:
    """One kill with the etcd-v3 backend."""
    with a_cluster([etcd.endpoint], "etcd-v3") as cluster:
        cluster.start_nodes(3)
        cluster.wait_step(KILL_AT_STEP)
        formation_s = read_formation(cluster.folder / "journal")
        pause_s, checkpoint = kill_and_wait(cluster, cluster.node_of_rank(number % 3), cap_s)
        if pause_s is None:
            return Run(None, formation_s=formation_s)
        finish_s = finish(cluster)
        return Run(pause_s, measure_floor(checkpoint, workers=2), formation_s, finish_s)


def measure_c10d(cap_s: float) -> Run:
    """One kill with torchrun as it comes."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    with a_cluster([f"127.0.0.1:{port}"], "c10d") as cluster:
        cluster.start_node("host")
        cluster.wait_for(lambda: listens(port), 60.0, "the store of the c10d backend")
        victim, _ = cluster.start_nodes(2)
        cluster.wait_step(KILL_AT_STEP)
        pause_s, _ = kill_and_wait(cluster, victim, cap_s)
        return Run(pause_s)


@contextmanager
def a_cluster(endpoints: list[str], backend: str) -> Iterator[LocalCluster]:
    """A cluster in a folder that is deleted afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="restart-"))
    arguments = [f"--folder={folder}", *ARGUMENTS]
    try:
        with LocalCluster(
            endpoints,
            SCRIPT,
            folder,
            TorchrunOptions(
                min_nodes=2,
                max_nodes=3,
                backend=backend,
                conf={"mode": "restart"} if backend == "etcd-v3" else {},
            ),
            args=arguments,
        ) as cluster:
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def kill_and_wait(
    cluster: LocalCluster, victim: LocalNode, cap_s: float
) -> tuple[float | None, bytes]:
    """The pause, and the checkpoint that survivors found."""
    survivors = {node.name for node in cluster.running} - {victim.name}
    victim.kill()
    killed_s = time.time()
    checkpoint = (cluster.folder / "checkpoints" / "plain.pt").read_bytes()
    try:
        cluster.wait_for(
            lambda: has_recovered(cluster.ledger(), survivors, killed_s), cap_s, "recovery"
        )
    except ClusterTimeout:
        return None, checkpoint
    return max(pause_of(cluster.ledger(), name, killed_s) for name in survivors), checkpoint


def has_recovered(ledger: RunLedger, survivors: set[str], killed_s: float) -> bool:
    """Every survivor restarted after the kill and has completed a step since."""
    started = {s.node: s.time_s for s in ledger.starts if s.time_s > killed_s}
    stepped = {s.node for s in ledger.steps if s.time_s > started.get(s.node, float("inf"))}
    return survivors <= stepped


def pause_of(ledger: RunLedger, node: str, killed_s: float) -> float:
    """The longest gap between two steps of this node that ends after the kill."""
    times = sorted(s.time_s for s in ledger.steps if s.node == node)
    gaps = [b - a for a, b in itertools.pairwise(times) if b > killed_s]
    return max(gaps)


def finish(cluster: LocalCluster) -> float | None:
    """Train to the end at full speed; the time from the last step to the last agent's end."""
    survivors = cluster.running
    (cluster.folder / "hurry").touch()
    cluster.wait_for(lambda: not cluster.running, 120.0, "the end")
    ended_s = time.time()
    if any(node.exit_code != 0 for node in survivors):
        return None
    return ended_s - max(s.time_s for s in cluster.ledger().steps)


def read_formation(folder: Path) -> float:
    """Seconds from the last arrival to the last entry into the first world."""
    times = defaultdict(list)
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            event = json.loads(line)
            times[event["event"]].append(event["time"])
    return float(max(times["world-entered"]) - max(times["node-arrived"]))


def measure_floor(checkpoint: bytes, workers: int) -> float:
    """Start that many workers at once without agents; seconds until all have loaded."""

    def prepare(folder: Path) -> Sequence[str]:
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "plain.pt").write_bytes(checkpoint)
        return [str(SCRIPT), f"--folder={folder}", *ARGUMENTS]

    return start_time(prepare, workers)


def start_time(prepare: Callable[[Path], Sequence[str]], workers: int) -> float:
    """Start that many workers at once without agents; seconds until all have loaded.

    ``prepare`` makes ``checkpoints`` in a new folder, and returns the script and its arguments.
    """
    folder = Path(tempfile.mkdtemp(prefix="floor-"))
    try:
        (folder / "ledger").mkdir()
        script = prepare(folder)
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        began_s = time.time()
        processes = [start_worker(script, folder, rank, workers, port) for rank in range(workers)]
        try:
            deadline = time.monotonic() + 120.0
            while len(read_ledger(folder / "ledger").starts) < workers:
                if time.monotonic() > deadline or any(p.poll() is not None for p in processes):
                    raise RuntimeError("the workers of the floor did not start")
                time.sleep(0.01)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return max(s.time_s for s in read_ledger(folder / "ledger").starts) - began_s
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start_worker(
    script: Sequence[str], folder: Path, rank: int, size: int, port: int
) -> subprocess.Popen[bytes]:
    """What torchrun would start."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "ELASTIC_NODE_NAME": f"floor{rank}",
        "ELASTIC_LEDGER": str(folder / "ledger"),
        "ELASTIC_CHECKPOINTS": str(folder / "checkpoints"),
    }
    return subprocess.Popen(
        [sys.executable, *script],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def rows_of(elastic: list[Run], c10d: list[Run]) -> Iterator[Row]:
    """The report's rows."""
    yield row(PAUSE, "elastic", elastic, lambda run: run.pause_s)
    if c10d:
        yield row(PAUSE, "torchrun-c10d", c10d, lambda run: run.pause_s)
    yield row(FLOOR, "elastic", [r for r in elastic if r.floor_s], lambda run: run.floor_s)
    yield row(SHARE, "elastic", elastic, share_of, unit="")
    yield row(FORMATION, "elastic", elastic, lambda run: run.formation_s)
    yield row(FINISH, "elastic", elastic, lambda run: run.finish_s)


def share_of(run: Run) -> float | None:
    if run.pause_s is None or run.floor_s is None:
        return None
    return run.pause_s / (1.5 * run.floor_s + 2.0)


def row(
    case: str, subject: str, runs: list[Run], of: Callable[[Run], float | None], unit: str = "s"
) -> Row:
    values = [of(run) for run in runs]
    samples = tuple(value for value in values if value is not None)
    return Row(case, subject, unit, samples, failed=len(values) - len(samples))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    reap_descendants()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the result as one object")
    parser.add_argument("--kills", type=int, default=10, help="runs with etcd-v3")
    parser.add_argument("--peers", type=int, default=3, help="runs with stock c10d; 0: none")
    parser.add_argument("--cap-s", type=float, default=120.0, help="when a run counts as lost")
    options = parser.parse_args()

    elastic, c10d = [], []
    with EmbeddedEtcd() as etcd:
        for number in range(options.kills):
            elastic.append(measure_elastic(etcd, number, options.cap_s))
            say(f"elastic {number + 1} of {options.kills}: {elastic[-1]}")
    for number in range(options.peers):
        c10d.append(measure_c10d(options.cap_s))
        say(f"torchrun c10d {number + 1} of {options.peers}: {c10d[-1]}")

    Report("restart", seed=0, rows=tuple(rows_of(elastic, c10d))).show(as_json=options.json)


if __name__ == "__main__":
    main()
