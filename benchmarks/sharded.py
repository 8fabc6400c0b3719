"""What sharded models cost under the harness: pauses, steps, memory, and the transfer of a state.

    python benchmarks/sharded.py                       a table; about 5 minutes
    python benchmarks/sharded.py --json                one JSON object (measurement.py)
    python benchmarks/sharded.py --thorough            twice as many samples of everything
    python benchmarks/sharded.py --steady 0 --worlds 0 --transfers 0      only deaths of ranks

Nodes on this machine, all settings at their defaults but ``quarantine_s=0.5``. On CPUs
with gloo; where there are GPUs, with NCCL and a GPU for each rank, up to six. The script is
benchmarks/scripts/sharded_net.py: AdamW, steps with 15 ms of sleep.

How each number is measured:

kill a rank
    Three nodes of two workers; one worker gets SIGKILL. ``HSDP``: the nodes are replicas of two
    ranks. ``DDP``: six ranks hold the model each. A pause has a step in it, and a step of FSDP2
    takes longer than one of DDP: a sleep between the forward and the backward pass makes the steps
    of both last ``--step-s``, as long as their own work does not take longer. The longest time
    between two completed steps of any other node that ends before its replacement trains; a step
    counts when both ranks of the node have completed it. ``… and its return``: the same, around the
    world with the replacement.
    Jobs of both alternate. ``HSDP / DDP`` is the ratio of the medians of a round. ``recovery``: the
    part of it between the last step and the next one (event ``recovered``), the median of the
    survivors; what is left are the step that was cut short, and the one that is done in its place:
    ``a step`` between deaths, the median of the same jobs.
steps lost
    Committed steps that were done again, over all kills of those jobs.
kill a node of four
    FSDP2 over four ranks, then three. ``run.build``: in process, from the nodes' memory, saved each
    10 steps. ``restart, DCP``: all workers start again, and load what torch.distributed.checkpoint
    has saved each 10 steps. The pause, as above, and the steps that are done again. ``recovery``:
    as above. ``beyond a start``: the pause of a restart, minus the time in which the three workers
    start without any agent right after it: processes, imports, groups, FSDP2, load.
steady
    Two replicas of two ranks on one node: the step time over that of torch's own HSDP on the same
    mesh, runs alternated; the CPU time of rank 0 per step and the most memory that it had, over
    torch's. Where others use the machine, too, the CPU time says more than the step time.
transfer
    Three replicas of two ranks with a state of ``--transfer-mib`` in all; one replica is killed and
    returns. Bytes that both of its ranks received, over the time of the slower one (events
    ``state-received``), which includes the hash of every byte and the copy into the model and the
    optimizer. ``raw stream``: as many bytes over two TCP connections at once, between two pairs of
    processes, from and into memory of that size, all of which was touched before. When the job has
    ended: its steps would take their cores. Before each transfer, as much memory as a replica needs
    is touched and freed, for a virtual machine may get it from its host at the first touch, in more
    time than the transfer takes; it may give it back within seconds, too. ``raw stream, new
    memory``: the same into memory that was not touched before, as that of a process that returns is
    at first; the ranks of the replica touch theirs before they are ready to join. ``sources``:
    living replicas that sent parts of the state of each position, of two: the fewest of any.
    ``--link-mbit``: everything in a network namespace of its own (root), over one link of that rate
    (a token bucket on its loopback interface). Without it the processors are the limit here, which
    the ranks of a job share; between machines the network usually is.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measurement import Report, Row
from recovery import C10D, ours_at, timed_run
from restart import say, start_time

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.cluster import ClusterTimeout, LocalCluster
from elastic.testing.forks.child import fork
from elastic.testing.journal import read_journal
from elastic.testing.ledger import RunLedger
from elastic.testing.node import LocalNode, TorchrunOptions
from elastic.testing.reaper import reap_descendants

SCRIPT = Path(__file__).parent / "scripts" / "sharded_net.py"
CAP_S = 120.0
SETTLE_S = 0.7  # of steps after an event, so that a pause shows
EVERY = 10  # steps between saves of a state that no rank holds whole
MIB = 1 << 20
PIECE_BYTES = 4 * MIB
BYTES_A_PARAMETER = 12  # fp32, with both moments of AdamW
IN_NAMESPACE = "SHARDED_BENCHMARK_IN_NAMESPACE"


@dataclass
class Samples:
    """By (case, subject), in the order in which they were first measured."""

    values: dict[tuple[str, str, str], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    failed: dict[tuple[str, str, str], int] = field(default_factory=lambda: defaultdict(int))

    def add(self, case: str, subject: str, unit: str, value: float) -> None:
        self.values[case, subject, unit].append(value)
        say(f"{case}, {subject}: {value:.3f} {unit}")

    def fail(self, case: str, subject: str, unit: str) -> None:
        self.failed[case, subject, unit] += 1

    def rows(self) -> tuple[Row, ...]:
        keys = dict.fromkeys((*self.values, *self.failed))
        return tuple(Row(*key, tuple(self.values[key]), self.failed[key]) for key in keys)


# Pauses ------------------------------------------------------------------------------------------


@contextmanager
def a_job(
    etcd: EmbeddedEtcd, kind: str, nodes: int, nproc: int, **settings: float
) -> Iterator[Job]:
    folder = Path(tempfile.mkdtemp(prefix="sharded-"))
    try:
        with LocalCluster(
            [etcd.endpoint],
            SCRIPT,
            folder,
            TorchrunOptions(
                min_nodes=1 if nproc > 1 else nodes - 1,
                max_nodes=nodes,
                nproc=nproc,
                conf={"quarantine_s": 0.5, "failure_budget": 100_000},
            ),
            args=[
                kind,
                f"--every={EVERY}",
                *(f"--{k.replace('_', '-')}={v}" for k, v in settings.items()),
            ],
        ) as cluster:
            cluster.start_nodes(nodes)
            yield Job(cluster, nodes * nproc)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Job:
    """A job of so many ranks that is hurt again and again."""

    def __init__(self, cluster: LocalCluster, size: int) -> None:
        self.cluster, self.size = cluster, size

    def wait_whole(self, after: int = 0) -> int:
        """Until all ranks train together in a generation after that one; returns it."""
        return self.cluster.wait_for(lambda: self._whole(after), CAP_S, "all ranks training")

    def _whole(self, after: int) -> int | None:
        steps = self.cluster.ledger().steps
        newest = max((s.generation for s in steps), default=0)
        ranks = {s.rank for s in steps if s.generation == newest}
        return newest if newest > after and len(ranks) == self.size else None

    def wait_stepped(self, nodes: set[str], after: int) -> None:
        """Until all of these have completed a step in a generation after that one."""
        self.cluster.wait_for(
            lambda: (
                nodes <= {s.node for s in self.cluster.ledger().steps if s.generation > after}
                or None
            ),
            CAP_S,
            "the survivors' next step",
        )
        time.sleep(SETTLE_S)


def pause_of(ledger: RunLedger, nodes: set[str], since_s: float, until_s: float) -> float:
    """The longest time between two completed steps of one of the nodes, where it ends in
    between."""
    longest = 0.0
    for node in nodes:
        ends: dict[tuple[int, int], float] = {}  # of the slowest rank of the node
        for step in ledger.steps:
            if step.node == node:
                key = (step.generation, step.step)
                ends[key] = max(step.time_s, ends.get(key, 0.0))
        times = sorted(ends.values())
        gaps = [b - a for a, b in itertools.pairwise(times) if since_s < b < until_s]
        longest = max([longest, *gaps])
    return longest


def step_time(ledger: RunLedger) -> float:
    """The median time of a step within a world, of the slowest rank of a node."""
    ends: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for step in ledger.steps:
        known = ends[step.node, step.generation]
        known[step.step] = max(step.time_s, known.get(step.step, 0.0))
    gaps = [b - a for known in ends.values() for a, b in itertools.pairwise(sorted(known.values()))]
    return statistics.median(gaps)


def recovery_of(job: Job, generation: int, after: int) -> float | None:
    """The median time in which the survivors entered the first world after that one."""
    found = [e for e in events(job, "recovered") if after < e["generation"] <= generation]
    first = min((e["generation"] for e in found), default=0)
    took = [e["duration_s"] for e in found if e["generation"] == first]
    return statistics.median(took) if took else None


def done_again(ledger: RunLedger) -> int:
    """Committed steps that a later generation has begun with again."""
    return sum(
        len({s.step for s in ledger.steps if s.generation == generation and s.step >= cut})
        for generation, cut in ledger.cuts.items()
    )


def measure_ranks(
    etcd: EmbeddedEtcd, rounds: int, kills: int, step_s: float, found: Samples
) -> None:
    """A rank of six is killed: of three replicas, and of unsharded ones."""
    case = "kill a rank"
    for number in range(rounds):
        medians = {}
        kinds = [("hsdp", "HSDP 3×2"), ("ddp", "DDP, 6 ranks")]
        for kind, subject in kinds if number % 2 == 0 else kinds[::-1]:
            pauses: list[float] = []
            with a_job(etcd, kind, 3, 2, equal_step_s=step_s) as job:
                try:
                    pauses.extend(kill_rank(job, found, case, subject) for _ in range(kills))
                except ClusterTimeout as error:
                    found.fail(case, subject, "s")
                    say(f"gave this job up: {error}")
                ledger = job.cluster.ledger()
                found.add("steps lost", subject, "steps", done_again(ledger))
                found.add(f"{case}: a step", subject, "s", step_time(ledger))
            medians[kind] = statistics.median(pauses) if pauses else None
        if medians["hsdp"] and medians["ddp"]:
            found.add(case, "HSDP / DDP", "ratio", medians["hsdp"] / medians["ddp"])


def kill_rank(job: Job, found: Samples, case: str, subject: str) -> float:
    generation = job.wait_whole()
    time.sleep(SETTLE_S)
    victim = RANDOM.choice(job.cluster.running)
    others = {node.name for node in job.cluster.running} - {victim.name}
    began_s = time.time()
    victim.kill_worker(RANDOM.randrange(2))
    last = job.wait_whole(after=generation)
    time.sleep(SETTLE_S)
    ledger = job.cluster.ledger()
    returned_s = min(s.time_s for s in ledger.starts if s.generation == last)
    first = pause_of(ledger, others, began_s, returned_s)
    again = pause_of(ledger, others, returned_s, time.time())
    found.add(case, subject, "s", first or again)  # 0: the replacement was in the next world
    if recovery := recovery_of(job, last, generation):
        found.add(f"{case}: recovery", subject, "s", recovery)
    if first:
        found.add(f"{case}: its return", subject, "s", again)
    return first or again


def measure_worlds(etcd: EmbeddedEtcd, rounds: int, found: Samples) -> None:
    """A node of four is killed: FSDP2 over three from there on."""
    case = "kill a node of four"
    for _ in range(rounds):
        for kind, subject in (("build", "run.build"), ("restart", "restart, DCP")):
            with a_job(etcd, kind, 4, 1) as job:
                try:
                    generation = job.wait_whole()
                    job.cluster.wait_progress(2 * EVERY + RANDOM.randrange(EVERY), CAP_S)
                    victim: LocalNode = RANDOM.choice(job.cluster.running)
                    others = {node.name for node in job.cluster.running} - {victim.name}
                    began_s = time.time()
                    victim.kill()
                    job.wait_stepped(others, generation)
                    ledger = job.cluster.ledger()
                    pause_s = pause_of(ledger, others, began_s, time.time())
                    found.add(case, subject, "s", pause_s)
                    found.add(f"{case}: done again", subject, "steps", done_again(ledger))
                    newest = max(s.generation for s in ledger.steps)
                    if recovery := recovery_of(job, newest, generation):
                        found.add(f"{case}: recovery", subject, "s", recovery)
                    if kind == "restart":
                        start_s = restart_alone(job, kind)
                        found.add(f"{case}: a start", subject, "s", start_s)
                        found.add(f"{case}: beyond a start", subject, "s", pause_s - start_s)
                except ClusterTimeout as error:
                    found.fail(case, subject, "s")
                    say(f"gave this job up: {error}")


def restart_alone(job: Job, kind: str) -> float:
    """End the job, and start its remaining workers without agents; seconds until all have loaded
    the newest checkpoint."""
    nodes = job.cluster.running
    for node in nodes:
        node.kill()

    def prepare(folder: Path) -> Sequence[str]:
        shutil.copytree(job.cluster.folder / "checkpoints", folder / "checkpoints")
        return [str(SCRIPT), kind, f"--every={EVERY}"]

    return start_time(prepare, len(nodes))


# Steps -------------------------------------------------------------------------------------------


def measure_steady(etcd: EmbeddedEtcd, rounds: int, steps: int, width: int, found: Samples) -> None:
    """Runs of both, alternated."""
    sizes = (f"--steps={steps}", f"--width={width}")
    for _ in range(rounds):
        theirs = timed_run(C10D, SCRIPT, "torch-hsdp", *sizes, workers=4)
        ours = timed_run(ours_at(etcd), SCRIPT, "hsdp", *sizes, workers=4)
        found.add("steady", "HSDP 2×2 / torch's", "ratio", ours["wall_s"] / theirs["wall_s"])
        found.add("steady: CPU", "HSDP 2×2 / torch's", "ratio", ours["cpu_s"] / theirs["cpu_s"])
        more_ms = (ours["cpu_s"] - theirs["cpu_s"]) * 1e3
        found.add("steady: CPU of a worker per step", "HSDP 2×2 − torch's", "ms", more_ms)
        more_mib = ours["memory_mib"] - theirs["memory_mib"]
        found.add("steady: memory of a worker", "HSDP 2×2 − torch's", "MiB", more_mib)


# Transfer ----------------------------------------------------------------------------------------


def measure_transfers(etcd: EmbeddedEtcd, rounds: int, mib: int, found: Samples) -> None:
    """Of a state to a replica that returns, and of as many raw bytes once nothing trains."""
    width = int((mib * MIB / BYTES_A_PARAMETER / 2) ** 0.5)
    transfers: list[Transfer] = []
    with a_job(etcd, "hsdp", 3, 2, width=width) as job:
        try:
            transfers.extend(measure_transfer(job, mib * MIB) for _ in range(rounds))
        except ClusterTimeout as error:
            found.fail("transfer", "HSDP 3×2", "MiB/s")
            say(f"gave this job up: {error}")
    for transfer in transfers:
        size_bytes = transfer.size_bytes // transfer.pairs
        raw = raw_rate(transfer.pairs, size_bytes)
        found.add("transfer", "HSDP 3×2", "MiB/s", transfer.rate)
        found.add("transfer", "raw stream", "MiB/s", raw)
        found.add("transfer", "HSDP 3×2 / raw", "ratio", transfer.rate / raw)
        new = raw_rate(transfer.pairs, size_bytes, is_new=True)
        found.add("transfer", "raw stream, new memory", "MiB/s", new)
        found.add("transfer", "HSDP 3×2 / raw, new memory", "ratio", transfer.rate / new)
        found.add("transfer: sources", "of 2 living", "replicas", transfer.sources)


@dataclass(frozen=True)
class Transfer:
    """Of a state to all ranks of a replica."""

    pairs: int  # of a sender and a receiver
    size_bytes: int  # of all of them
    duration_s: float  # of the slowest
    sources: int  # replicas that sent, to the rank with the fewest of them

    @property
    def rate(self) -> float:
        """MiB per second."""
        return self.size_bytes / MIB / self.duration_s


def measure_transfer(job: Job, size_bytes: int) -> Transfer:
    generation = job.wait_whole()
    before = len(events(job, "state-received"))
    _touched(2 * size_bytes).release()  # freed at once, for the replica that returns
    RANDOM.choice(job.cluster.running).kill_worker(0)
    job.wait_whole(after=generation)
    return transfer_of(events(job, "state-received")[before:])


def transfer_of(received: Sequence[Mapping[str, Any]]) -> Transfer:
    """Of the events of the ranks of one replica."""
    return Transfer(
        pairs=len(received),
        size_bytes=sum(event["bytes"] for event in received),
        duration_s=max(event["duration_s"] for event in received),
        sources=min(len(event["sources"]) for event in received),
    )


def events(job: Job, name: str) -> list[dict[str, Any]]:
    return [e for e in read_journal(job.cluster.folder / "journal") if e["event"] == name]


def raw_rate(pairs: int, size_bytes: int, *, is_new: bool = False) -> float:
    """MiB per second of all pairs together, over TCP, from and into memory of that size which was
    touched before: neither the processor's caches nor new pages help or hinder it. ``is_new``: into
    memory that was not."""
    folder = Path(tempfile.mkdtemp(prefix="raw-"))
    try:
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(pairs)]
        pids = [fork(_sender(listener.getsockname(), size_bytes)) for listener in listeners]
        pids += [
            fork(_receiver(listener, size_bytes, folder / str(number), is_new=is_new))
            for number, listener in enumerate(listeners)
        ]
        for listener in listeners:
            listener.close()
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            raise RuntimeError(f"processes of the raw stream ended with {codes}")
        slowest = max(float((folder / str(number)).read_text()) for number in range(pairs))
        return pairs * size_bytes / MIB / slowest
    finally:
        shutil.rmtree(folder)


def _sender(address: tuple[str, int], size_bytes: int) -> Callable[[], None]:
    def work() -> None:
        state = _touched(size_bytes)
        with socket.create_connection(address) as to:
            to.recv(1)  # until its receiver is ready
            for start in range(0, size_bytes, PIECE_BYTES):
                to.sendall(state[start : start + PIECE_BYTES])

    return work


def _receiver(
    listener: socket.socket, size_bytes: int, result: Path, *, is_new: bool
) -> Callable[[], None]:
    def work() -> None:
        into = memoryview(mmap.mmap(-1, size_bytes)) if is_new else _touched(size_bytes)
        connection, _ = listener.accept()
        connection.sendall(b".")
        began_s, at = time.perf_counter(), 0
        while at < size_bytes:
            at += connection.recv_into(into[at : at + PIECE_BYTES])
        result.write_text(str(time.perf_counter() - began_s))

    return work


def _touched(size_bytes: int) -> memoryview:
    """Memory with a page of its own for each of its parts."""
    memory = memoryview(bytearray(size_bytes))
    memory[::4096] = b"x" * len(memory[::4096])  # untouched pages are one page of zeros
    return memory


def limit_link(rate_mbit: int) -> None:
    """Run this script again in a network namespace whose one link has this rate."""
    if os.environ.get(IN_NAMESPACE) is None:
        os.environ[IN_NAMESPACE] = "1"
        os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv])
    bucket = f"tbf rate {rate_mbit}mbit burst 1mb latency 50ms"
    for command in ("ip link set lo up", f"tc qdisc add dev lo root {bucket}"):
        subprocess.run(command.split(), check=True)


RANDOM = random.Random()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the result as one object")
    parser.add_argument("--rounds", type=int, default=1, help="of jobs whose ranks are killed")
    parser.add_argument("--kills", type=int, default=3, help="in each of those jobs")
    parser.add_argument("--step-s", type=float, default=0.3, help="of those jobs; 0: as they are")
    parser.add_argument("--worlds", type=int, default=2, help="nodes killed under FSDP2")
    parser.add_argument("--steady", type=int, default=3, help="alternated pairs of runs")
    parser.add_argument("--steps", type=int, default=150, help="of each steady run")
    parser.add_argument("--width", type=int, default=512, help="of the model in steady runs")
    parser.add_argument("--transfers", type=int, default=3, help="replicas that return")
    parser.add_argument("--thorough", action="store_true", help="twice as many of all of these")
    parser.add_argument("--transfer-mib", type=int, default=384, help="of the state, in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--link-mbit", type=int, help="rate of the link; default: unlimited")
    options = parser.parse_args()
    if options.link_mbit:
        limit_link(options.link_mbit)
    reap_descendants()
    if options.thorough:
        for name in ("rounds", "worlds", "steady", "steps", "transfers"):
            setattr(options, name, 2 * getattr(options, name))
    RANDOM.seed(options.seed)
    found = Samples()
    try:
        with EmbeddedEtcd() as etcd:
            measure_steady(etcd, options.steady, options.steps, options.width, found)
            if options.kills:
                measure_ranks(etcd, options.rounds, options.kills, options.step_s, found)
            measure_worlds(etcd, options.worlds, found)
            if options.transfers:
                measure_transfers(etcd, options.transfers, options.transfer_mib, found)
    finally:  # what was measured until a failure has taken long enough
        Report("sharded", options.seed, found.rows()).show(as_json=options.json)


if __name__ == "__main__":
    main()
