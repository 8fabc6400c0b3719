"""Ranks that are slower than the others: detected with their cause, and replaced if configured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_job import SCRIPTS, TrainingJob, Workload, train_undisturbed

from elastic.membership.records import WorldRecord
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.journal import read_journal
from elastic.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

SCRIPT = SCRIPTS / "stragglers.py"
WORKLOAD = Workload(samples=1000, batch=24, epochs=8, step_s=0.02, save_every=50)
# A worker ordered to be slow is eight times slower. A worker that merely shares its core on a busy
# machine does not reach this factor.
CONF = {"straggler_action": "exclude", "straggler_factor": 3, "straggler_window_s": 0.5}


def events(job: TrainingJob, name: str) -> list[dict[str, Any]]:
    return [e for e in read_journal(job.folder / "journal") if e["event"] == name]


def of_rank(job: TrainingJob, name: str, rank: int) -> list[dict[str, Any]]:
    return [e for e in events(job, name) if e["rank"] == rank]


def newest(job: TrainingJob, cause: str) -> dict[str, Any] | None:
    """The last finding with that cause."""
    found = [e for e in events(job, "straggler-found") if e["cause"] == cause]
    return found[-1] if found else None


def world_of(job: TrainingJob) -> WorldRecord:
    world = job.world()
    assert world is not None
    return world


def members(job: TrainingJob) -> list[str]:
    return [member.name for member in world_of(job).members]


def test_a_straggler_is_named_with_its_cause_and_replaced_by_a_spare(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """In one cluster, since it takes seconds to start: temporarily slow data; then a slow forward
    pass, and a spare as a replacement.
    """
    undisturbed = train_undisturbed(tmp_path / "undisturbed", WORKLOAD, SCRIPT)
    folder = tmp_path / "job"
    with TrainingJob(
        [etcd.endpoint], folder, script=SCRIPT, workload=WORKLOAD, min_nodes=2, conf=CONF
    ) as job:
        job.bring_to(3)
        generation, names = job.generation(), members(job)

        (folder / "slow-data").write_text(names[1])
        found = job.wait_for(lambda: newest(job, "data wait"), PATIENCE_S, "slow data")
        assert (found["of_node"], found["rank"]) == (names[1], 1)
        assert found["data_s"] > 3 * found["compute_s"]
        assert found["factor"] >= 3
        assert "of data wait in a step" in found["reason"]
        job.wait_for(
            lambda: any(found["reason"] in node.log_text() for node in job.running),
            PATIENCE_S,
            "its sentence in a log",
        )
        (folder / "slow-data").unlink()
        job.wait_for(lambda: of_rank(job, "straggler-recovered", 1), PATIENCE_S, "its recovery")

        (folder / "slow-compute").write_text(names[2])
        found = job.wait_for(lambda: newest(job, "compute"), PATIENCE_S, "a slow forward pass")
        assert (found["of_node"], found["rank"]) == (names[2], 2)
        assert job.generation() == generation, "nobody waits who could take its place"

        job.start_node("spare")
        job.wait_for(lambda: "spare" in members(job), PATIENCE_S, "a world with the spare node")
        world = world_of(job)
        assert (world.generation, len(world.members)) == (generation + 1, 3)
        assert names[2] not in members(job)
        assert world.reason.startswith(f"spare replaces {names[2]}: rank 2 on {names[2]} took")
        job.wait_training(nodes=3, after_generation=generation)
        # The excluded node becomes ready again and waits: it replaces no other node.
        job.wait_for(
            lambda: job.node(names[2]).workers() and job.node(names[2]).running,
            PATIENCE_S,
            "workers of the node that was left out",
        )
        job.wait_progress(20)
        assert job.generation() == generation + 1
        assert events(job, "world-fault") == [], "the change waited for the end of a step"
        assert events(job, "worker-died") == []
        assert of_rank(job, "straggler-found", 0) == [], "rank 0 evaluates"

        job.assert_finishes_whole(undisturbed)
