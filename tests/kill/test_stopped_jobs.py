"""`elastic stop`, then a node that is started again for exit code 75, and `elastic resume`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from training_job import SCRIPTS, TrainingJob, Workload

import checkpoints
from elastic.cli.main import main
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.waiting import PATIENCE_S

# Only the end of a job, or of a node's part in it, saves a checkpoint.
WORKLOAD = Workload(samples=240, epochs=400, step_s=0.05, save_every=100_000)


def test_a_stopped_job_saves_waits_and_goes_on(
    etcd: EmbeddedEtcd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with TrainingJob(
        [etcd.endpoint],
        tmp_path,
        script=SCRIPTS / "saving.py",
        workload=replace(WORKLOAD, step_s=0.2),
        min_nodes=1,
        max_nodes=2,
    ) as job:
        where = [f"--rdzv-id={job.run_id}", f"--rdzv-endpoint={etcd.endpoint}"]
        nodes = job.bring_to(2)
        job.wait_progress(3)
        assert main(["stop", *where]) == 0
        assert [node.wait(PATIENCE_S) for node in nodes] == [75, 75]
        saved = max(c.step for c in checkpoints.list_checkpoints(tmp_path / "checkpoints"))
        generation = job.generation()

        (again,) = job.start_nodes(1)  # as Kubernetes and Slurm do
        job.wait_for(lambda: again.name in job.registered() or None, PATIENCE_S, "a waiting node")
        capsys.readouterr()
        assert main(["status", *where]) == 0
        assert f"{again.name} waits" in capsys.readouterr().out
        assert (again.running, job.generation()) == (True, generation), "no world has formed"

        assert main(["resume", *where]) == 0
        job.wait_step(saved + 2)
        assert again.running
