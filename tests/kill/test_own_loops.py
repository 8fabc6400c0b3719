"""User-defined loops, in-process: ``run.attempts()``, and begin/commit/is_fault/recover."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from training_job import (
    FINAL,
    SCRIPTS,
    TrainingJob,
    Workload,
    assert_same_weights,
    train_undisturbed,
)

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.node import LocalNode

SCRIPT = SCRIPTS / "own_loop.py"


def workload(api: str) -> Workload:
    return Workload(samples=480, epochs=5, step_s=0.4, extra=(f"--api={api}",))


def notes(job: TrainingJob, what: str) -> list[dict[str, Any]]:
    path = job.folder / "notes"
    lines = path.read_text().splitlines() if path.exists() else []
    return [note for line in lines if (note := json.loads(line))["what"] == what]


@pytest.mark.parametrize("api", ["attempts", pytest.param("plugin", marks=pytest.mark.slow)])
def test_survivors_continue_in_custom_loops(etcd: EmbeddedEtcd, tmp_path: Path, api: str) -> None:
    with TrainingJob(
        [etcd.endpoint],
        tmp_path / "job",
        script=SCRIPT,
        workload=workload(api),
        min_nodes=2,
        max_nodes=4,
        conf={"last_call_s": 1.0},
    ) as job:
        nodes = job.start_nodes(3)
        generation = job.wait_training(nodes=3)
        first = job.node_of_rank(0)
        others = {pid(node) for node in nodes if node is not first}
        (main,) = notes(job, "main")
        assert main["pid"] == pid(first)

        first.kill_worker()
        generation = job.wait_training(nodes=3, after_generation=generation)

        assert {pid(node) for node in nodes if node is not first} == others
        new_main = notes(job, "main")[-1]
        assert new_main["pid"] in others, "who became main was not called back"
        seen = {note["generation"]: note["size"] for note in notes(job, "world")}
        trained = {s.generation for s in job.ledger().steps}
        worlds = {s.generation: s.size for s in job.ledger().starts if s.generation in trained}
        assert worlds[generation] == 3
        assert worlds.items() <= seen.items(), "the script is notified of each world"

        job.start_node()  # arrives around the end, and exits cleanly
        job.hurry()
        assert set(job.wait_ended().values()) == {0}
        job.ledger().final_hash()
    alone = train_undisturbed(tmp_path / "alone", workload(api), SCRIPT)
    assert_same_weights(job.folder / FINAL, alone)


def pid(node: LocalNode) -> int:
    return node.workers()[0].pid
