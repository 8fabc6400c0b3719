"""Restart mode with checkpoints in the nodes' memory: steps may be lost, recovery never fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from etcd_certificates import Authority
from training_job import NEVER, SCRIPTS, TrainingJob, Workload, train_undisturbed

import checkpoints
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.faults import Everyone, Kill, KillWorker, OfRank
from elastic.testing.journal import read_journal

EVERY = 2
SCRIPT = SCRIPTS / "wiring.py"

WORKLOAD = Workload(samples=240, epochs=8, step_s=0.5, save_every=NEVER)


def restored(job: TrainingJob) -> list[dict[str, Any]]:
    """The checkpoint that each worker restored, oldest first."""
    found = read_journal(job.folder / "journal")
    return [e for e in found if e["event"] == "state-restored"]


@pytest.mark.parametrize(
    "has_tls",
    [pytest.param(False, id="plain"), pytest.param(True, id="tls", marks=pytest.mark.slow)],
)
def test_killed_workers_and_a_killed_node_restore_from_memory(
    etcd: EmbeddedEtcd, tmp_path: Path, has_tls: bool
) -> None:
    tls = Authority(tmp_path, "nodes").node_settings("node") if has_tls else {}
    undisturbed = train_undisturbed(tmp_path / "alone", WORKLOAD, SCRIPT)
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "disk-full").touch()
    with TrainingJob(
        [etcd.endpoint],
        tmp_path / "job",
        script=SCRIPT,
        workload=replace(WORKLOAD, extra=(f"--memory-every={EVERY}",)),
        min_nodes=2,
        max_nodes=3,
        conf={"mode": "restart", **tls},
    ) as job:
        job.bring_to(3)
        for fault in ("workers", "node"):
            _progress(job)
            step, before = job.ledger().last_step, len(restored(job))
            generation = job.generation()
            (Kill(OfRank(1)) if fault == "node" else KillWorker(Everyone())).inject(job)
            job.wait_training(nodes=2 if fault == "node" else 3, after_generation=generation)
            went_on = restored(job)[before:]
            sources = {(e["generation"], e["source"]) for e in went_on}
            assert len(sources) == len(dict(sources)), "one for all ranks of a world"
            # The newest may not have been written or replicated everywhere; a busy machine skips
            # some.
            assert all(e["step"] >= step - 5 * EVERY > 0 for e in went_on), (step, went_on)
            assert checkpoints.list_checkpoints(job.folder / "checkpoints") == ()
        (job.folder / "disk-full").unlink()
        job.assert_finishes_whole(undisturbed)


def _progress(job: TrainingJob) -> None:
    """Wait for enough steps for several saves into memory."""
    job.wait_step(job.ledger().last_step + 6 * EVERY)
