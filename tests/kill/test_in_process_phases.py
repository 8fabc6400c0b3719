"""Workers die at every point of a step, a recovery, and an epoch; the others continue.

The script is a GAN: two optimizers, of which one may have stepped when the world ends. Its final
weights, averages, learning rates and evaluations must be those of a run without any death.
"""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from job_series import JobSeries, StartSeries
from training_job import SCRIPTS, TrainingJob, Workload, train_undisturbed

from elastic.membership.records import WorldRecord
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.journal import read_journal
from elastic.testing.node import LocalNode, worker_pids
from elastic.testing.waiting import PATIENCE_S
from elastic.wire.messages import Cause

SCRIPT = SCRIPTS / "phases.py"
WORKLOAD = Workload(samples=250, epochs=20, step_s=0.6)
IN_A_STEP = ("forward", "backward", "between", "after-optimizer", "after-scheduler", "evaluation")
IN_A_RECOVERY = ("before-build", "after-build")
IN_A_TRANSFER = ("receiving", "received", "sending", "sent")
# The others only in `make test-all`.
IN_SHORT = ("before-build", "sending")


def points(*names: str) -> pytest.MarkDecorator:
    marks = {name: () if name in IN_SHORT else (pytest.mark.slow,) for name in names}
    return pytest.mark.parametrize(
        "point", [pytest.param(name, marks=marks[name]) for name in names]
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("phases"), WORKLOAD, SCRIPT)


@pytest.fixture(scope="module")
def jobs(etcd: EmbeddedEtcd, start_series: StartSeries, reference: Path) -> JobSeries[TrainingJob]:
    return start_series(
        lambda folder: TrainingJob(
            [etcd.endpoint],
            folder,
            script=SCRIPT,
            workload=WORKLOAD,
            min_nodes=1,
            max_nodes=3,
        ),
        reference,
    )


def order(job: TrainingJob, point: str, node: LocalNode | None, step: int | None = None) -> Path:
    """Order a worker of this node, or of any node, to die at ``point``."""
    path = job.folder / f"die-{point}"
    staged = path.with_suffix(".new")
    staged.write_text(json.dumps({"node": node.name if node is not None else None, "step": step}))
    return staged.rename(path)


@dataclass(frozen=True)
class Before:
    """The processes before the fault."""

    generation: int
    pids: dict[str, int]


@pytest.fixture
def before(job: TrainingJob, nodes: list[LocalNode]) -> Before:
    return Before(job.generation(), worker_pids(nodes))


def is_planned(world: WorldRecord | None, before: Before) -> bool:
    """Whether it is a later world than before, entered by a planned change."""
    is_later = world is not None and world.generation > before.generation
    return is_later and world is not None and world.switch_at_step is not None


def all_back(
    job: TrainingJob, before: Before, dead: int = 1, *, timeout_s: float = PATIENCE_S
) -> None:
    """Three nodes train in a new world; all but ``dead`` workers are the same as before."""

    def together() -> bool:
        generation, names = job.training_nodes()
        if not before.generation < generation == job.generation() or len(names) < 3:
            return False
        now = worker_pids(job.running)
        return sum(now.get(name) != pid for name, pid in before.pids.items()) == dead

    job.wait_for(together, timeout_s, f"{dead} of {before.pids} replaced, the others untouched")


@points(*IN_A_STEP)
def test_a_death_in_a_step_keeps_the_other_workers(
    job: TrainingJob, before: Before, point: str
) -> None:
    job.wait_obeyed(order(job, point, None))
    all_back(job, before)


@points(*IN_A_RECOVERY)
def test_a_death_during_a_recovery_keeps_the_other_workers(
    job: TrainingJob, nodes: list[LocalNode], before: Before, point: str
) -> None:
    """A survivor dies while it builds the next world."""
    orders = [order(job, point, nodes[2]), order(job, "between", nodes[1])]
    job.wait_obeyed(*orders)
    all_back(job, before, dead=2)


@points(*IN_A_TRANSFER)
def test_a_death_in_a_state_transfer_keeps_the_other_workers(
    job: TrainingJob, nodes: list[LocalNode], before: Before, point: str
) -> None:
    """A worker dies and rejoins: it, or the source of its state, dies again."""
    job.wait_obeyed(order(job, point, None), order(job, "forward", nodes[1]))
    is_receiver = point.startswith("receiv")
    all_back(job, before, dead=1 if is_receiver else 2)


def test_two_deaths_50_ms_apart_keep_the_third_worker(
    job: TrainingJob, nodes: list[LocalNode], before: Before
) -> None:
    nodes[0].kill_worker()
    time.sleep(0.05)
    nodes[2].kill_worker()
    all_back(job, before, dead=2)


def test_a_rank_that_leaves_a_collective_blocks_no_peer(job: TrainingJob, before: Before) -> None:
    """One rank sees a broken connection and leaves the collective; its process is alive, so its
    peers keep waiting in the collective. All continue, and no process is replaced.
    """
    began_s = time.monotonic()
    job.wait_obeyed(order(job, "give-up", None))
    all_back(job, before, dead=0)
    job.wait_event("world-formed", lambda e: e["cause"] == Cause.FAILURE.value, since_s=began_s)


@pytest.mark.slow
def test_a_fault_swallowed_by_the_script_still_causes_a_recovery(
    job: TrainingJob, before: Before
) -> None:
    swallow = job.folder / "swallow"
    swallow.touch()
    try:
        job.running[1].kill_worker()
        all_back(job, before)
    finally:
        swallow.unlink()


@pytest.mark.slow
def test_a_broken_connection_during_a_pending_planned_change_is_survived(job: TrainingJob) -> None:
    nodes = job.bring_to(2)
    before = Before(job.generation(), worker_pids(nodes))
    job.start_node()
    job.wait_for(lambda: is_planned(job.world(), before), PATIENCE_S, "a planned world")
    job.wait_obeyed(order(job, "give-up", nodes[0]))
    all_back(job, before, dead=0)


@pytest.mark.slow
def test_a_death_in_the_step_after_a_join_keeps_the_other_workers(job: TrainingJob) -> None:
    nodes = job.bring_to(2)
    before = Before(job.generation(), worker_pids(nodes))
    job.start_node()
    job.wait_generation(before.generation + 1)
    job.wait_obeyed(order(job, "backward", nodes[0]))
    all_back(job, before)


@pytest.mark.slow
def test_a_death_in_the_last_step_keeps_the_other_workers(
    job: TrainingJob, nodes: list[LocalNode], reference: Path
) -> None:
    last = WORKLOAD.steps - 1
    doomed = order(job, "between", nodes[1], last)
    job.assert_finishes_whole(reference)
    assert not doomed.exists()
    assert_only_dead_workers_restarted(job)
    job.assert_only_the_outcome_is_stored()


def assert_only_dead_workers_restarted(job: TrainingJob) -> None:
    """Every start of workers follows a death on that node, or is the node's first."""
    events = read_journal(job.folder / "journal")
    for node in job.nodes:
        mine = [e for e in events if e["node"] == node.name and "node_id" in e]
        again = [e for e in mine if e["event"] == "node-arrived"][1:]
        told = "\n".join([f"{node.name}:", *map(str, mine)])
        assert all(e["exit_code"] == -signal.SIGKILL for e in again), told
