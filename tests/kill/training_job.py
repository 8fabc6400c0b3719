"""A training job with a known outcome, on a cluster for fault injection.

Steps are slow until :meth:`TrainingJob.hurry`: a test has time for its faults regardless of the
number of steps, and the job then ends quickly. :mod:`elastic.testing.pacing` defines the pace, and
why the second half of a job is slower.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from elastic.membership.records import Node, decode
from elastic.store.keyvalue import KeyValue
from elastic.testing.cluster import ClusterTimeout, LocalCluster
from elastic.testing.forks.server import ForkServer, shared_fork_server
from elastic.testing.journal import read_events
from elastic.testing.node import LocalNode, TorchrunOptions
from elastic.testing.pacing import SLOW
from elastic.testing.slowness import is_within, measure_slowness
from elastic.testing.waiting import PATIENCE_S, eventually

SCRIPTS = Path(__file__).parent / "scripts"
SESSION = SCRIPTS / "session.py"  # written with this project's API
PLAIN = SCRIPTS / "plain_ddp.py"  # plain torch
FINAL = "final.safetensors"
NEVER = 1_000_000  # saves: at the end only
NOTHING_LEFT_WITHIN_S = 5.0  # after the last agent, on an idle machine
# All agents, after the last step, on an idle machine. The guarantee is 5 s (benchmarks/restart.py
# measures it); this must detect a wait for dead nodes: torch's exit barrier takes 300 s.
EXIT_WITHIN_S = 20.0


@dataclass(frozen=True)
class Workload:
    """The workload of a job. The last batch of an epoch is smaller on purpose."""

    samples: int = 500
    batch: int = 24
    # Few and long steps: the job lasts as long, and needs less CPU time after hurry().
    epochs: int = 6
    step_s: float = 0.5  # before hurry(); the second half of the job is slower
    save_every: int = 10
    loader_workers: int = 0
    extra: tuple[str, ...] = ()  # more arguments of the script

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch)

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * self.epochs

    def arguments(self, folder: Path) -> list[str]:
        return [
            f"--folder={folder}",
            f"--samples={self.samples}",
            f"--batch={self.batch}",
            f"--epochs={self.epochs}",
            f"--step-s={self.step_s}",
            f"--save-every={self.save_every}",
            *([f"--loader-workers={self.loader_workers}"] if self.loader_workers else []),
            *self.extra,
        ]


class TrainingJob(LocalCluster):
    """A LocalCluster that trains a Workload with one of the scripts; ``options`` are those of
    :class:`~elastic.testing.node.TorchrunOptions`.

    With ``fork_server=None`` its processes start as in production, and import torch for seconds.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        folder: Path,
        *,
        script: Path = SESSION,
        workload: Workload | None = None,
        run_id: str | None = None,
        open_store: Callable[[], KeyValue] | None = None,
        fork_server: ForkServer | Literal["shared"] | None = "shared",
        **options: Any,
    ) -> None:
        self.workload = workload or Workload()
        # More faults per minute than a real job should survive: budget and quarantine are not
        # tested here.
        conf = {"failure_budget": 1000, "quarantine_s": 0.5, **options.pop("conf", {})}
        super().__init__(
            endpoints,
            script,
            folder,
            TorchrunOptions(conf=conf, **options),
            args=self.workload.arguments(folder),
            run_id=run_id,
            open_store=open_store,
            fork_server=shared_fork_server() if fork_server == "shared" else fork_server,
        )

    def hurry(self) -> None:
        """Train at full speed from now on."""
        (self.folder / "hurry").touch()

    @property
    def is_ending(self) -> bool:
        """Whether :meth:`hurry` was called, or the job has ended without it."""
        return (self.folder / "hurry").exists() or bool(self.ledger().ends)

    @contextmanager
    def slow_steps(self, node: LocalNode | None = None) -> Iterator[None]:
        """Steps so long that the announcement of a planned world is in time, however busy the
        machine is; of one node, or of all."""
        slow = self.folder / (SLOW if node is None else f"{SLOW}-{node.name}")
        slow.touch()
        try:
            yield
        finally:
            slow.unlink()

    @property
    def is_late(self) -> bool:
        """Whether the job is well into its second half, in which steps are slow."""
        return self.ledger().last_step >= self.workload.steps * 2 // 3

    def bring_to(self, count: int) -> list[LocalNode]:
        """Start nodes, or kill the newest, until ``count`` run; wait until exactly those train
        together."""
        for node in self.running[count:]:
            node.kill()
        self.start_nodes(count - len(self.running))
        names = {node.name for node in self.running}
        self.wait_for(
            lambda: self.training_nodes()[1] == names, PATIENCE_S, f"{sorted(names)} train together"
        )
        return self.running

    def registered(self) -> set[str]:
        """The names of the nodes in etcd: the key of a dead node exists until its lease expires."""
        entries = self.store.list(self.keys.nodes).entries
        return {decode(Node, entry.key, entry.value).name for entry in entries}

    def wait_running(self, name: str) -> None:
        """Wait until the node's agent has logged that its workers run in a world: a worker may
        begin a step before that.
        """

        def runs() -> bool:
            entries = self.store.list(self.keys.nodes).entries
            nodes = (decode(Node, entry.key, entry.value) for entry in entries)
            return any(node.name == name and node.running is not None for node in nodes)

        self.wait_for(runs, PATIENCE_S, f"{name}'s workers running")

    def journaled(self, name: str, *, since_s: float = 0.0) -> list[dict[str, Any]]:
        """Events of all journals, oldest first, since a time on the monotonic clock."""
        return read_events(self.folder / "journal", name, since_s=since_s)

    def wait_event(
        self,
        name: str,
        accepts: Callable[[dict[str, Any]], bool] = lambda event: True,
        *,
        since_s: float = 0.0,
    ) -> dict[str, Any]:
        """The first such event, once it is logged, which may be later than its effects."""

        def found() -> dict[str, Any] | None:
            return next(filter(accepts, self.journaled(name, since_s=since_s)), None)

        return self.wait_for(found, PATIENCE_S, f"the event {name}")

    def wait_obeyed(self, *orders: Path) -> None:
        """Wait until a process has taken each of these files, which are orders."""
        self.wait_for(
            lambda: not any(order.exists() for order in orders),
            PATIENCE_S,
            f"the end of {', '.join(order.name for order in orders)}",
        )

    def assert_only_the_outcome_is_stored(self) -> None:
        """Call after the end: etcd holds only the outcome, once the leases of killed nodes have
        expired, and where the checkpoints are.
        """
        kept = {self.keys.world, self.keys.done, self.keys.secret}
        either = kept, kept | {self.keys.checkpoint_folder}
        eventually(
            lambda: {entry.key for entry in self.store.list(self.keys.root).entries} in either,
            f"nothing but {sorted(kept)} in the store",
        )

    def assert_finishes_whole(
        self, undisturbed: Path, timeout_s: float = 2 * PATIENCE_S, *, stages: int = 1
    ) -> None:
        """Hurry to the end and verify all invariants of a job, whatever happened to it:

        all running agents end with 0 soon after the last step, nothing is left running, each
        sample had exactly one effect per epoch, two worlds never trained at once, the weights
        are equal on all ranks and those of an undisturbed run to 1e-6.

        ``stages``: so many consecutive ranks of a pipeline have the same samples.
        """
        survivors = self.running
        self.hurry()
        self.wait_for(lambda: not self.running or None, timeout_s, "the end of the job")
        ended_s = time.time()
        try:
            self.assert_nothing_left(NOTHING_LEFT_WITHIN_S)
        except ClusterTimeout:  # measuring takes seconds of CPU time, and is rarely needed
            self.assert_nothing_left(NOTHING_LEFT_WITHIN_S * (measure_slowness() - 1))
        codes = {node.name: node.exit_code for node in survivors}
        assert set(codes.values()) == {0}, f"{codes}\n{self.report()}"
        ledger = self.ledger()
        took_s = ended_s - max(s.time_s for s in ledger.steps)
        assert is_within(took_s, EXIT_WITHIN_S)
        first_stages = replace(
            ledger,
            steps=tuple(step for step in ledger.steps if step.rank % stages == 0),
            begins=tuple(step for step in ledger.begins if step.rank % stages == 0),
        )
        first_stages.assert_exactly_once(self.workload.samples, self.workload.epochs)
        ledger.assert_one_world_at_a_time()
        ledger.final_hash()
        assert_same_weights(self.folder / FINAL, undisturbed)


def train_undisturbed(
    folder: Path, workload: Workload, script: Path = SESSION, env: Mapping[str, str] | None = None
) -> Path:
    """Train the same job in one process without a cluster or checkpoints; returns its final
    weights.
    """
    workload = replace(workload, save_every=NEVER)
    for part in ("ledger", "checkpoints"):
        (folder / part).mkdir(parents=True)
    (folder / "hurry").touch()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ELASTIC_NODE_NAME": "alone",
        "ELASTIC_LEDGER": str(folder / "ledger"),
        "ELASTIC_CHECKPOINTS": str(folder / "checkpoints"),
        **(env or {}),
    }
    command = [sys.executable, str(script), *workload.arguments(folder)]
    log = folder / "log"
    alone = LocalNode("alone", command, environment, "", log, fork_server=shared_fork_server())
    assert alone.wait(2 * PATIENCE_S) == 0, alone.log_text()
    return folder / FINAL


def assert_same_weights(one: Path, other: Path) -> None:
    """Both files hold the same tensors to 1e-6."""
    a, b = load_file(one), load_file(other)
    assert a.keys() == b.keys()
    for name in a:
        # Not torch.testing.assert_close: it imports DTensor, for two seconds of CPU time.
        assert (a[name].shape, a[name].dtype) == (b[name].shape, b[name].dtype), name
        assert torch.allclose(a[name], b[name], rtol=0, atol=1e-6), name
