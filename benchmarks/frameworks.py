"""What recovery in process costs inside the trainers of other projects.

    python benchmarks/frameworks.py                          a table
    python benchmarks/frameworks.py --json                   one JSON object (measurement.py)
    python benchmarks/frameworks.py --kills 2 --only accelerate fabric
    python benchmarks/frameworks.py --kills 0 --resumes 0 --out results.json    steps: ten minutes

``--out`` is written after each measurement, so that one that is interrupted is not lost; of the
file's rows, those that are not measured again remain.

One model of two million parameters and one dataset in each trainer, with three local nodes of one
worker, gloo (benchmarks/scripts/framework_loop.py). The subjects take turns, in an order at random.

pause
    A node is killed at a random moment. The longest time between two consecutive updates of any
    survivor that ends after it. ``pause / loop``: to that of the same model in a plain loop with
    ``run.retry``, in the same round.
step
    The median time between two updates, undisturbed. ``step / loop``: to that loop in the same
    round. ``step / plain``: to the framework's own under torchrun, without this library.
resume
    Another job (benchmarks/scripts/framework_resume.py), 60 updates of 3 epochs, of which a node
    that is not the host of c10d's store is killed once; beside it the same job as the framework's
    documentation resumes, restarted by torchrun with its own c10d rendezvous. Pause as above, the
    updates that the job has made of its 60, and samples of an epoch that were lost, and repeated,
    in the weights at the end. Updates after the loaded checkpoint do not count as repeated: those
    before the restart are not part of the weights. A job that does not end within --cap-s failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import random
import socket
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from measurement import Report, Row

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.cluster import LocalCluster
from elastic.testing.node import TorchrunOptions
from elastic.testing.reaper import reap_descendants
from elastic.testing.waiting import PATIENCE_S

SCRIPT = Path(__file__).parent / "scripts" / "framework_loop.py"
LOOP = "loop"
FRAMEWORKS = ("accelerate", "fabric", "lightning", "transformers")
NODES, SEED = 3, 11
EPOCHS, ENDLESS = 5, 400  # of 32 updates; of a job that is killed
WARM_UP, SETTLE_S = 20, (1.0, 3.0)


class Job:
    """Three nodes that run the script."""

    def __init__(self, etcd: EmbeddedEtcd, kind: str, *, epochs: int, is_elastic: bool) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="frameworks-")
        self.folder = Path(self._temporary.name)
        least = 1 if is_elastic else NODES
        self.cluster = LocalCluster(
            [etcd.endpoint],
            SCRIPT,
            self.folder / "job",
            TorchrunOptions(min_nodes=least, max_nodes=NODES, conf={"quarantine_s": 0.5}),
            args=[kind, str(self.folder), str(epochs)],
        )

    def __enter__(self) -> Job:
        self.cluster.__enter__()
        self.nodes = self.cluster.start_nodes(NODES)
        return self

    def __exit__(self, *error: object) -> None:
        self.cluster.__exit__(*error)  # type: ignore[arg-type]
        self._temporary.cleanup()

    def updates(self) -> dict[str, list[float]]:
        """When each process has completed each of its updates."""
        return {
            file.name: [float(line.split()[0]) for line in file.read_text().splitlines()]
            for file in self.folder.glob("steps-*")
        }

    def wait_updates(self, count: int) -> None:
        def reached() -> bool:
            seen = self.updates()
            return len(seen) >= NODES and min(map(len, seen.values())) >= count

        self.cluster.wait_for(reached, PATIENCE_S, f"{count} updates of {NODES} processes")

    def wait_ended(self) -> None:
        self.cluster.wait_ended(PATIENCE_S)


def step_s(etcd: EmbeddedEtcd, kind: str, epochs: int) -> float:
    """The median of an undisturbed run."""
    with Job(etcd, kind, epochs=epochs, is_elastic=not kind.startswith("plain-")) as job:
        job.wait_ended()
        return statistics.median(
            later - earlier
            for times in job.updates().values()
            for earlier, later in itertools.pairwise(times[WARM_UP:])
        )


def pause_s(etcd: EmbeddedEtcd, kind: str, pick: random.Random) -> float:
    """A node is killed."""
    with Job(etcd, kind, epochs=ENDLESS, is_elastic=True) as job:
        job.wait_updates(WARM_UP)
        time.sleep(pick.uniform(*SETTLE_S))
        victim = pick.choice(job.nodes)
        killed_s = time.time()
        victim.kill()
        survivors = {name for name, times in job.updates().items() if times}

        def have_continued() -> bool:
            later = [n for n, t in job.updates().items() if t[-1] > killed_s + 1.0]
            return len(set(later) & survivors) >= NODES - 1

        job.cluster.wait_for(have_continued, PATIENCE_S, "updates of the survivors")
        return max(
            later - earlier
            for times in job.updates().values()
            for earlier, later in itertools.pairwise(times)
            if later > killed_s
        )


RESUME = Path(__file__).parent / "scripts" / "framework_resume.py"
SAMPLES, RESUMED_EPOCHS, KILLED_AFTER = 480, 3, 27  # of an epoch; the update


@dataclass(frozen=True)
class Update:
    """One update of one process."""

    at_s: float
    number: int
    epoch: int
    samples: tuple[int, ...]


def read_updates(folder: Path) -> list[list[Update]]:
    """Those of each process."""
    return [_updates_of(path) for path in folder.glob("updates-*")]


def _updates_of(path: Path) -> list[Update]:
    return [
        Update(float(at), int(number), int(epoch), _numbers(samples))
        for at, number, epoch, samples in map(str.split, path.read_text().splitlines())
    ]


def _numbers(line: str) -> tuple[int, ...]:
    return tuple(map(int, line.split(",")))


def with_unfinished(folder: Path) -> list[list[Update]]:
    """:func:`read_updates`, and the update in which a process was killed, if others completed it
    with what it had read: they have not read its samples themselves."""
    files = {path: _updates_of(path) for path in folder.glob("updates-*")}
    every = list(files.values())
    for path, own in files.items():
        lines = (folder / path.name.replace("updates", "read")).read_text().splitlines()
        if not own or not lines or _numbers(lines[-1]) == own[-1].samples:
            continue
        number, samples = own[-1].number + 1, _numbers(lines[-1])
        others = [u for updates in every if updates is not own for u in updates]
        completed = [u for u in others if u.number == number]
        if completed and not any(set(samples) & set(u.samples) for u in completed):
            own.append(Update(completed[0].at_s, number, completed[0].epoch, samples))
    return every


def lost_and_repeated(processes: list[list[Update]], killed_s: float) -> tuple[int, int]:
    """The samples that the weights at the end lack, and have more than once, over all epochs.
    ``killed_s``: processes that begin after it have loaded a checkpoint, and replace updates."""
    restarted = [p for p in processes if p and p[0].at_s > killed_s]
    first = min((p[0].number for p in restarted), default=None)
    kept: dict[tuple[int, int], set[int]] = defaultdict(set)
    for process in processes:
        for update in process:
            if first is None or process in restarted or update.number < first:
                kept[update.epoch, update.number].update(update.samples)
    read = Counter((epoch, sample) for (epoch, _), all in kept.items() for sample in all)
    lost = sum(read[e, s] == 0 for e in range(RESUMED_EPOCHS) for s in range(SAMPLES))
    return lost, sum(read.values()) - len(read)


def resumed(etcd: EmbeddedEtcd, kind: str, cap_s: float) -> dict[str, float] | None:
    """What the death of a node does to a job; None: it did not end within ``cap_s``."""
    is_plain = kind.startswith("plain-")
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}" if is_plain else etcd.endpoint
    options = TorchrunOptions(
        min_nodes=1,
        max_nodes=NODES,
        backend="c10d" if is_plain else "etcd-v3",
        conf={} if is_plain else {"quarantine_s": 0.5},
    )
    with tempfile.TemporaryDirectory(prefix="frameworks-") as temporary:
        folder = Path(temporary)
        arguments = [kind, str(folder)]
        with LocalCluster([endpoint], RESUME, folder / "job", options, args=arguments) as cluster:
            host = cluster.start_node("host")
            if is_plain:
                cluster.wait_for(lambda: _listens(endpoint), PATIENCE_S, "c10d's store")
            victim, _ = cluster.start_nodes(NODES - 1)

            def reached() -> bool:
                processes = read_updates(folder)
                return len(processes) >= NODES and all(
                    p and p[-1].number >= KILLED_AFTER for p in processes
                )

            cluster.wait_for(reached, PATIENCE_S, f"update {KILLED_AFTER}")
            killed_s = time.time()
            victim.kill()
            deadline_s = time.monotonic() + cap_s
            while host.running and time.monotonic() < deadline_s:
                time.sleep(0.5)
            processes = with_unfinished(folder)
            has_ended = not host.running
        times = sorted(update.at_s for process in processes for update in process)
        last = max(u.number for p in processes for u in p)
        if not has_ended or times[-1] < killed_s:
            return None
        pauses = [b - a for a, b in itertools.pairwise(times) if b > killed_s]
        lost, repeated = lost_and_repeated(processes, killed_s)
        return {"pause": max(pauses), "updates": last, "lost": lost, "repeated": repeated}


def _listens(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
        return True
    return False


UNITS = {"pause": "s", "updates": "updates", "lost": "samples", "repeated": "samples"}


class Measurements:
    """The rows so far: those of the last run in the file, and this one's in their place."""

    def __init__(self, out: Path | None) -> None:
        self._out = out
        self._rows: dict[tuple[str, str], Row] = {}
        if out is not None and out.exists():
            for row in json.loads(out.read_text())["rows"]:
                values, failed = tuple(row["samples"]), row["failed"]
                read = Row(row["case"], row["subject"], row["unit"], values, failed)
                self._rows[read.case, read.subject] = read
        self._own: set[tuple[str, str]] = set()

    def add(self, case: str, subject: str, unit: str, value: float | None) -> None:
        """Add a sample; None: the run failed."""
        key = case, subject
        row = self._rows[key] if key in self._own else Row(case, subject, unit, ())
        self._own.add(key)
        if value is None:
            self._rows[key] = replace(row, failed=row.failed + 1)
        else:
            self._rows[key] = replace(row, samples=(*row.samples, value))

    @property
    def report(self) -> Report:
        return Report("frameworks", SEED, tuple(self._rows.values()))

    def save(self) -> None:
        """Write the rows so far to the file, if there is one."""
        if self._out is None:
            return
        partial = self._out.with_suffix(".partial")
        partial.write_text(self.report.to_json() + "\n")
        partial.replace(self._out)


def measure_pauses(
    measured: Measurements, etcd: EmbeddedEtcd, installed: list[str], pick: random.Random
) -> None:
    """One kill of each subject."""
    kinds = [LOOP, *installed]
    took = {k: pause_s(etcd, k, pick) for k in pick.sample(kinds, len(kinds))}
    for kind in kinds:
        measured.add("pause", kind, "ms", took[kind] * 1e3)
        if kind != LOOP:
            measured.add("pause / loop", kind, "x", took[kind] / took[LOOP])
    measured.save()


def measure_steps(
    measured: Measurements,
    etcd: EmbeddedEtcd,
    installed: list[str],
    pick: random.Random,
    epochs: int,
) -> None:
    """One undisturbed run of each subject, and of each framework without this library."""
    kinds = [LOOP, *installed, *(f"plain-{f}" for f in installed)]
    took = {k: step_s(etcd, k, epochs) for k in pick.sample(kinds, len(kinds))}
    for kind in [LOOP, *installed]:
        measured.add("step", kind, "ms", took[kind] * 1e3)
        if kind != LOOP:
            measured.add("step / loop", kind, "x", took[kind] / took[LOOP])
            measured.add("step / plain", kind, "x", took[kind] / took[f"plain-{kind}"])
    measured.save()


def measure_resume(measured: Measurements, etcd: EmbeddedEtcd, kind: str, cap_s: float) -> None:
    """One job that resumes."""
    outcome = resumed(etcd, kind, cap_s)
    for name, unit in UNITS.items():
        measured.add(f"resume: {name}", kind, unit, None if outcome is None else outcome[name])
    measured.save()


def main() -> None:
    reap_descendants()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kills", type=int, default=7, help="of each subject")
    parser.add_argument("--rounds", type=int, default=3, help="of undisturbed runs")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of an undisturbed run")
    parser.add_argument("--resumes", type=int, default=1, help="of each, and as documented")
    parser.add_argument("--cap-s", type=float, default=600.0, help="of a job that resumes")
    parser.add_argument("--out", type=Path, help="written after each measurement")
    parser.add_argument("--only", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS)
    args = parser.parse_args()
    pick = random.Random(SEED)
    installed = [f for f in args.only if importlib.util.find_spec(f.replace("fabric", "lightning"))]
    measured = Measurements(args.out)
    with EmbeddedEtcd() as etcd:
        for _ in range(args.kills):
            measure_pauses(measured, etcd, installed, pick)
        for _ in range(args.rounds):
            measure_steps(measured, etcd, installed, pick, args.epochs)
        for _ in range(args.resumes):
            for kind in [each for f in installed for each in (f, f"plain-{f}")]:
                measure_resume(measured, etcd, kind, args.cap_s)
    measured.report.show(as_json=args.json)


if __name__ == "__main__":
    main()
