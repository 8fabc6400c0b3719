"""Replicas of sharded models that save to the nodes' memory: the last replica may die, too.

Nothing is on disk. All workers of all replicas are killed at once, then a whole node with all other
workers. The job resumes a few steps back, from the parts in the memory of the remaining nodes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from training_job import NEVER, SCRIPTS, TrainingJob, Workload, train_undisturbed

import checkpoints
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.node import LocalNode
from elastic.testing.waiting import PATIENCE_S

SCRIPT = SCRIPTS / "paced_run.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "hsdp.py"
SHARDS = 2
EVERY = 2  # steps between two saves to memory
# Float64, and uneven shares: 22 samples are not divisible by the number of ranks.
WORKLOAD = Workload(
    samples=44,
    batch=22,
    epochs=18,
    step_s=0.4,
    save_every=NEVER,
    extra=(f"--example={EXAMPLE}", "--width=8", "--layers=1", "--precision=fp64"),
)


@dataclass(frozen=True)
class Layout:
    """The number of workers per node, of nodes that hold two replicas, and of those that train
    after the loss of one node."""

    nproc: int
    nodes: int
    nodes_left: int

    def __str__(self) -> str:
        return f"{self.nodes}x{self.nproc}"


def kill_workers(nodes: Iterable[LocalNode]) -> None:
    """At once: all are found before the first one dies."""
    for pid in [worker.pid for node in nodes for worker in node.workers().values()]:
        with suppress(ProcessLookupError):  # its replica has ended
            os.kill(pid, signal.SIGKILL)


def restored(job: TrainingJob, ranks: int, before: int = 0) -> list[dict[str, Any]]:
    """The checkpoints that ranks have restored since the first ``before`` of them, once there are
    ``ranks``: a journal may show them after the first steps."""

    def found() -> list[dict[str, Any]] | None:
        events = job.journaled("state-restored")[before:]
        return events if len(events) >= ranks else None

    return job.wait_for(found, PATIENCE_S, f"{ranks} ranks that restore a checkpoint")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    alone = replace(WORKLOAD, extra=(*WORKLOAD.extra, "--shard=1"))
    return train_undisturbed(tmp_path_factory.mktemp("alone"), alone, SCRIPT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        # Replicas over two nodes: after the loss of one, its partner, which has the only copy of
        # its parts, is not in the next world.
        Layout(1, 4, 2),
        pytest.param(Layout(2, 2, 1), marks=pytest.mark.soak),  # a replica per node
    ],
    ids=str,
)
def test_all_replicas_resume_from_the_nodes_memory(
    etcd: EmbeddedEtcd, tmp_path: Path, undisturbed: Path, layout: Layout
) -> None:
    with TrainingJob(
        [etcd.endpoint],
        tmp_path / "job",
        script=SCRIPT,
        workload=replace(WORKLOAD, extra=(*WORKLOAD.extra, f"--memory-every={EVERY}")),
        nproc=layout.nproc,
        min_nodes=layout.nodes_left,
        max_nodes=layout.nodes,
        conf={"replica_size": SHARDS} if layout.nproc < SHARDS else {},
    ) as job:
        job.start_nodes(layout.nodes)
        generation = job.wait_training(nodes=layout.nodes)
        for fault, left in (("workers", layout.nodes), ("node", layout.nodes_left)):
            job.wait_progress(4 * EVERY)
            before, last = len(restored(job, 0)), job.ledger().last_step
            others = job.running
            if fault == "node":
                writer = job.node_of_rank(0)
                others.remove(writer)
                writer.kill()
            kill_workers(others)
            generation = job.wait_training(nodes=left, after_generation=generation)
            went_on = restored(job, left * layout.nproc, before)
            # On a busy machine, some saves are skipped.
            assert all(e["step"] >= max(1, last - 4 * EVERY) for e in went_on), (last, went_on)
            assert checkpoints.list_checkpoints(job.folder / "checkpoints") == ()
        job.assert_finishes_whole(undisturbed)
