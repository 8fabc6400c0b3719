"""A rank of a replica takes long to end, while the other one's replacement already starts."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from slow_exit import SlowExit
from training_job import SCRIPTS, TrainingJob, Workload

from elastic.store.embedded.etcd import EmbeddedEtcd
from elastic.testing.processes import send

pytestmark = pytest.mark.cluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "hsdp.py"
WORKLOAD = Workload(
    samples=110,
    batch=22,
    epochs=1000,
    extra=(f"--example={EXAMPLE}", "--width=8", "--layers=1"),
)
# For the replacement to look for the rank that it is to meet. If it takes longer, it meets the
# right one in any case.
LOOKS_FOR_S = 2.0


def pids(job: TrainingJob) -> dict[int, int]:
    return {rank: worker.pid for rank, worker in job.running[0].workers().items()}


@pytest.mark.parametrize("dead", [0, 1])
def test_a_replacement_does_not_meet_the_rank_that_is_being_ended(
    etcd: EmbeddedEtcd, tmp_path: Path, dead: int
) -> None:
    with TrainingJob(
        [etcd.endpoint],
        tmp_path,
        script=SCRIPTS / "paced_run.py",
        workload=WORKLOAD,
        nproc=4,
        max_nodes=1,
    ) as job:
        job.start_nodes(1)
        generation = job.wait_training(nodes=1)
        before = pids(job)
        with SlowExit(before[1 - dead]) as slow:
            send(before[dead], signal.SIGKILL)
            slow.wait_held()
            replaced = job.wait_event("worker-replaced")
            assert replaced["local_rank"] == dead
            job.wait_event("journal-opened", lambda event: event["pid"] == replaced["pid"])
            time.sleep(LOOKS_FOR_S)
        job.wait_generation(generation + 1)
        job.wait_training(nodes=1, after_generation=generation)
        after = pids(job)
        assert after[0] != before[0] and after[1] != before[1]
        assert (after[2], after[3]) == (before[2], before[3])
