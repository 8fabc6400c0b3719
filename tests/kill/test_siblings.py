"""A worker of a one-node job dies: its siblings hold the job's last step.

In-process they keep it, and only the dead worker is replaced. If torchrun restarts them all, they
save it first.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from training_job import SCRIPTS, TrainingJob, Workload

import checkpoints
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.journal import read_journal
from elastic.testing.waiting import PATIENCE_S

SCRIPT = SCRIPTS / "wiring.py"
# Only a death saves a checkpoint.
WORKLOAD = Workload(samples=240, epochs=400, step_s=0.1, save_every=1000)
HOLD_AGAIN_S = 10.0  # many steps
NOTICES = (
    "training begins without run.retry()",
    "mode=restart: when the world changes",
    "no worker has called elastic.join()",
)


def kill(job: TrainingJob, local_rank: int) -> None:
    """Kill one worker, and wait until the job trains again."""
    generation = job.training_nodes()[0]
    job.running[0].kill_worker(local_rank)
    job.wait_for(lambda: job.ledger().last_generation > generation, PATIENCE_S, "the next world")
    (job.folder / "hold").unlink(missing_ok=True)
    job.wait_training(nodes=1, after_generation=generation)


def hold(job: TrainingJob) -> None:
    """Keep all workers in the script's own code, in the middle of a step.

    A worker that has just passed this point waits in a collective for those held there: then all
    are released, and held again.
    """
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        for left in job.folder.glob("held-*"):
            left.unlink()
        (job.folder / "hold").touch()
        again_s = time.monotonic() + HOLD_AGAIN_S
        while time.monotonic() < again_s:
            if len(list(job.folder.glob("held-*"))) == 3:
                return
            time.sleep(0.05)
        (job.folder / "hold").unlink()
        job.wait_progress()
    raise AssertionError(f"not all workers were held\n{job.report()}")


@pytest.mark.parametrize(
    ("wiring", "conf", "notice"),
    [
        pytest.param(
            "none",
            {},
            "training begins without run.retry()",
            id="without retry",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "retry",
            {"mode": "restart"},
            "mode=restart: when the world changes",
            id="mode=restart",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_death_of_one_worker_of_three_loses_no_step(
    etcd: EmbeddedEtcd, tmp_path: Path, wiring: str, conf: dict[str, object], notice: str
) -> None:
    workload = Workload(**{**vars(WORKLOAD), "extra": (f"--wiring={wiring}",)})
    with TrainingJob(
        [etcd.endpoint],
        tmp_path,
        script=SCRIPT,
        workload=workload,
        nproc=3,
        max_nodes=1,
        conf=conf,
    ) as job:
        job.start_nodes(1)
        job.wait_step(5)
        kill(job, 1)  # the others are in a collective, or soon at a boundary
        job.wait_progress()
        kill(job, 0)  # rank 0: another rank must write
        job.wait_progress()
        hold(job)  # no rank reaches a boundary
        kill(job, 2)
        job.wait_progress()
        ledger = job.ledger()
        assert ledger.recomputed_steps == 0, job.report()
        assert len(checkpoints.list_checkpoints(tmp_path / "checkpoints")) == 3
        notices = [n for n in NOTICES for _ in range(job.nodes[0].log_text().count(n))]
        assert notices == ([notice] if notice else []), "once, and what is true"
        starts = {s.generation: s.step for s in ledger.starts}
        first = min(starts)
        assert len(starts) == 4 and all(starts[g] > 0 for g in starts if g != first), starts


def test_in_process_only_the_dead_worker_is_replaced(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    """Also if the script calls init_process_group, as scripts for torchrun do."""
    workload = Workload(**{**vars(WORKLOAD), "extra": ("--wiring=deferred",)})
    with TrainingJob(
        [etcd.endpoint], tmp_path, script=SCRIPT, workload=workload, nproc=3, max_nodes=1
    ) as job:
        node = job.start_node()
        job.wait_step(5)
        before = pids(job)
        for local_rank in (1, 0):
            kill(job, local_rank)
            job.wait_progress()
        after = pids(job)
        assert after[2] == before[2] and after[1] != before[1] and after[0] != before[0]
        assert [place_before_worlds(job, before[rank])[:2] for rank in (0, 1)] == [(0, 3), (1, 3)]
        for replacement in (after[0], after[1]):
            rank, size, port = place_before_worlds(job, replacement)
            assert 0 < rank < size == 3 and port > 0, "rank 0 exists already"

        generation = job.generation()
        (tmp_path / "hold-start").touch()
        for local_rank in (1, 2):  # the second before the first one is replaced
            node.kill_worker(local_rank)
        (tmp_path / "hold-start").unlink()
        job.wait_training(nodes=1, after_generation=generation)
        assert pids(job)[0] == after[0]
        assert job.ledger().recomputed_steps == 0, job.report()
        assert checkpoints.list_checkpoints(tmp_path / "checkpoints") == (), "nobody had to save"

        # A replacement that is killed before it has joined is replaced again.
        before, generation = pids(job), job.generation()
        (tmp_path / "hold-start").touch()
        node.kill_worker(2)
        job.wait_for(
            lambda: pids(job).get(2, before[2]) != before[2], PATIENCE_S, "the replacement"
        )
        node.kill_worker(2)
        (tmp_path / "hold-start").unlink()
        job.wait_training(nodes=1, after_generation=generation)
        assert pids(job)[0] == before[0] and pids(job)[1] == before[1]
        assert checkpoints.list_checkpoints(tmp_path / "checkpoints") == (), "nobody had to save"

        # A failure before readiness is not a transient fault: all are restarted, after a save.
        before = pids(job)
        (tmp_path / "fail-start").touch()
        node.kill_worker(2)
        job.wait_for(lambda: len(restored(job)) > 3, PATIENCE_S, "a restart of all")
        job.wait_progress()
        assert set(pids(job).values()).isdisjoint(before.values())
        assert job.ledger().recomputed_steps == 0, job.report()
        assert len(checkpoints.list_checkpoints(tmp_path / "checkpoints")) == 1
        events = read_journal(tmp_path / "journal")
        replaced = [e["local_rank"] for e in events if e["event"] == "worker-replaced"]
        assert replaced[:2] == [1, 0] and sorted(replaced[2:]) == [1, 2, 2, 2, 2], replaced
        assert not [n for n in NOTICES if n in node.log_text()], "in-process is what is promised"


def pids(job: TrainingJob) -> dict[int, int]:
    """The pids of the live workers, by local rank."""
    return {rank: process.pid for rank, process in job.running[0].workers().items()}


def place_before_worlds(job: TrainingJob, pid: int) -> tuple[int, ...]:
    """The rank, the size and the port that a worker has read before its first world."""
    return tuple(map(int, (job.folder / f"rank-{pid}").read_text().split()))


@pytest.mark.slow
def test_the_memory_tier_is_preferred_to_the_disk(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    """The agent outlives its workers, so a restore from its memory needs no disk."""
    extra = (f"--memory-every={WORKLOAD.save_every}",)
    with TrainingJob(
        [etcd.endpoint],
        tmp_path,
        script=SCRIPT,
        workload=Workload(**{**vars(WORKLOAD), "extra": extra}),
        nproc=3,
        max_nodes=1,
        conf={"mode": "restart"},
    ) as job:
        job.start_nodes(1)
        job.wait_step(5)
        generation = job.generation()
        (tmp_path / "disk-full").touch()
        job.running[0].kill_worker(0)
        job.wait_for(lambda: len(restored(job)) >= 6, PATIENCE_S, "the next world")
        (tmp_path / "disk-full").unlink()
        job.wait_training(nodes=1, after_generation=generation)
        assert job.ledger().recomputed_steps == 0, job.report()
        assert all(event["step"] >= 5 for event in restored(job)[3:])
        assert checkpoints.list_checkpoints(tmp_path / "checkpoints") == ()


def restored(job: TrainingJob) -> list[dict[str, Any]]:
    """The checkpoint that each worker restored, oldest first."""
    found = read_journal(job.folder / "journal")
    return [e for e in found if e["event"] == "state-restored"]
