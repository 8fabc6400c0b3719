"""Replacements of a replica's ranks that cannot meet, or would meet the wrong ones."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from job_series import JobSeries, StartSeries
from slow_exit import SlowExit
from training_job import SCRIPTS, TrainingJob, Workload

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.processes import send

EXAMPLE = Path(__file__).parents[2] / "examples" / "hsdp.py"
WORKLOAD = Workload(
    samples=110,
    batch=22,
    epochs=1000,
    extra=(f"--example={EXAMPLE}", "--width=8", "--layers=1"),
)
# Time for the replacement to look up its peer. If it takes longer, it finds the right one in any
# case.
LOOKS_FOR_S = 2.0


def pids(job: TrainingJob) -> dict[int, int]:
    return {rank: worker.pid for rank, worker in job.running[0].workers().items()}


@pytest.fixture(scope="module")
def jobs(etcd: EmbeddedEtcd, start_series: StartSeries) -> JobSeries[TrainingJob]:
    return start_series(
        lambda folder: TrainingJob(
            [etcd.endpoint],
            folder,
            script=SCRIPTS / "phases_of_replicas.py",
            workload=WORKLOAD,
            nproc=4,
            max_nodes=1,
        )
    )


@pytest.fixture
def generation(job: TrainingJob) -> int:
    """The generation in which the node's two replicas of two ranks train."""
    if not job.running:
        job.start_nodes(1)
    return job.wait_training(nodes=1)


def assert_first_is_replaced(job: TrainingJob, generation: int, before: dict[int, int]) -> None:
    """The first replica trains again in new processes, the second one in its own."""
    job.wait_training(nodes=1, after_generation=generation)
    after = pids(job)
    assert not {after[0], after[1]} & {before[0], before[1]}
    assert (after[2], after[3]) == (before[2], before[3])


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_replacement_does_not_meet_a_rank_that_is_being_terminated(
    job: TrainingJob, generation: int, dead: int
) -> None:
    before, since_s = pids(job), time.monotonic()
    with SlowExit(before[1 - dead]) as slow:
        send(before[dead], signal.SIGKILL)
        slow.wait_held()
        replaced = job.wait_event("worker-replaced", since_s=since_s)
        assert replaced["local_rank"] == dead
        job.wait_event("journal-opened", lambda event: event["pid"] == replaced["pid"])
        time.sleep(LOOKS_FOR_S)
    assert_first_is_replaced(job, generation, before)


@pytest.mark.slow
def test_a_meeting_with_an_unresponsive_rank_times_out(job: TrainingJob, generation: int) -> None:
    """Its peer waits for it while constructing torch's default group."""
    before, since_s = pids(job), time.monotonic()
    hang = job.folder / "hang-meeting"
    hang.touch()
    send(before[0], signal.SIGKILL)
    job.wait_obeyed(hang)
    job.wait_event(
        "worker-died", lambda event: "has not reached" in event["reason"], since_s=since_s
    )
    assert_first_is_replaced(job, generation, before)
    (warned, *_) = job.journaled("workers-not-ready", since_s=since_s)
    assert "local rank 0" in warned["reason"]
