"""What recovery in process costs inside the trainers of other projects.

    python benchmarks/frameworks.py                          a table
    python benchmarks/frameworks.py --json                   one JSON object (measurement.py)
    python benchmarks/frameworks.py --kills 2 --only accelerate fabric

One model of two million parameters and one dataset in each trainer, with three local nodes of one
worker, gloo (benchmarks/scripts/framework_loop.py). The subjects take turns, in an order at random.

pause
    A node is killed at a random moment. The longest time between two consecutive updates of any
    survivor that ends after it. ``pause / loop``: to that of the same model in a plain loop with
    ``run.retry``, in the same round.
step
    The median time between two updates, undisturbed. ``step / loop``: to that loop in the same
    round. ``step / plain``: to the framework's own under torchrun, without this library.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import random
import statistics
import tempfile
import time
from collections import defaultdict
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
EPOCHS = 40  # of 32 updates
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
    with Job(etcd, kind, epochs=10 * EPOCHS, is_elastic=True) as job:
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


def main() -> None:
    reap_descendants()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kills", type=int, default=7, help="of each subject")
    parser.add_argument("--rounds", type=int, default=3, help="of undisturbed runs")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of an undisturbed run")
    parser.add_argument("--only", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS)
    args = parser.parse_args()
    pick = random.Random(SEED)
    installed = [f for f in args.only if importlib.util.find_spec(f.replace("fabric", "lightning"))]
    samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    with EmbeddedEtcd() as etcd:
        for _ in range(args.kills):
            kinds = [LOOP, *installed]
            took = {k: pause_s(etcd, k, pick) for k in pick.sample(kinds, len(kinds))}
            for kind, value in took.items():
                samples["pause", kind, "ms"].append(value * 1e3)
                if kind != LOOP:
                    samples["pause / loop", kind, "x"].append(value / took[LOOP])
        for _ in range(args.rounds):
            kinds = [LOOP, *installed, *(f"plain-{f}" for f in installed)]
            took = {k: step_s(etcd, k, args.epochs) for k in pick.sample(kinds, len(kinds))}
            for kind in [LOOP, *installed]:
                samples["step", kind, "ms"].append(took[kind] * 1e3)
                if kind != LOOP:
                    samples["step / loop", kind, "x"].append(took[kind] / took[LOOP])
                    plain_s = took[f"plain-{kind}"]
                    samples["step / plain", kind, "x"].append(took[kind] / plain_s)
    rows = tuple(Row(*key, tuple(values)) for key, values in samples.items())
    Report("frameworks", SEED, rows).show(as_json=args.json)


if __name__ == "__main__":
    main()
