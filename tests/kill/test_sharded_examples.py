"""Examples of sharded models: after deaths of a rank and a node, the others resume from shards."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from training_job import SCRIPTS, TrainingJob, Workload, train_undisturbed

import checkpoints
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.forks.server import shared_fork_server
from elastic.testing.node import LocalNode
from elastic.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

SCRIPT = SCRIPTS / "paced_example.py"
EXAMPLES = Path(__file__).parents[2] / "examples"
CONTEXT, SAMPLES = 16, 192
ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


def workload(example: str, *extra: str) -> Workload:
    return Workload(
        samples=SAMPLES,
        batch=24,
        epochs=6,
        step_s=0.6,
        save_every=3,
        extra=(f"--example={EXAMPLES / example}", *extra),
    )


def job_of(etcd: EmbeddedEtcd, folder: Path, of: Workload, nproc: int = 1) -> TrainingJob:
    return TrainingJob([etcd.endpoint], folder, script=SCRIPT, workload=of, nproc=nproc)


def wait_saved(job: TrainingJob) -> int:
    """The step of a checkpoint of the current generation, once there is one."""
    generation = job.generation()

    def newest() -> int | None:
        found = checkpoints.list_checkpoints(job.folder / "checkpoints")
        return next((info.step for info in found if info.generation >= generation), None)

    return job.wait_for(newest, PATIENCE_S, "a checkpoint")


def assert_resumed(job: TrainingJob, generation: int, saved: int) -> None:
    """The generation began with a checkpoint at least as new."""
    begun: dict[int, int] = {}
    for start in job.ledger().starts:  # one for each epoch
        if start.generation == generation:
            begun[start.rank] = min(start.step, begun.get(start.rank, start.step))
    assert len(set(begun.values())) == 1 and begun[0] >= saved


def samples_by_position(job: TrainingJob) -> dict[tuple[int, int, int], list[list[int]]]:
    """The samples of each rank, by generation, step and position in the data dimension."""
    seen = defaultdict(list)
    for file in (job.folder / "samples").iterdir():
        for line in file.read_text().splitlines():
            note = json.loads(line)
            seen[note["generation"], note["step"], note["position"]].append(note["samples"])
    return seen


def test_fsdp2_resumes_on_three_ranks_from_the_shards_of_four(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(i * i % 251 for i in range(CONTEXT * SAMPLES + 1)))
    sizes = (f"--text={text}", f"--context={CONTEXT}", "--width=16", "--layers=1")
    of = workload("fsdp2_char_lm.py", *sizes, "--micro-batch=5", "--precision=fp64")
    reference = tmp_path / "undisturbed"
    reference.mkdir()
    undisturbed = train_undisturbed(reference, of, SCRIPT, ALONE)
    with job_of(etcd, tmp_path / "job", of) as job:
        first, last = job.start_node(nproc=2), job.start_nodes(2)[1]
        generation = job.wait_training(nodes=3)
        saved = wait_saved(job)
        first.kill_worker(1)
        generation = job.wait_training(nodes=3, after_generation=generation)
        assert_resumed(job, generation, saved)
        saved = wait_saved(job)
        last.kill()
        generation = job.wait_training(nodes=2, after_generation=generation)
        assert_resumed(job, generation, saved)
        assert {s.size for s in job.ledger().starts if s.generation == generation} == {3}
        job.assert_finishes_whole(undisturbed)


def test_bf16_training_resumes_exactly_from_its_checkpoint(tmp_path: Path) -> None:
    """The default of the example; optimizer state and parameters are kept in full precision."""
    (tmp_path / "text").write_bytes(bytes(i * i % 251 for i in range(CONTEXT * SAMPLES + 1)))

    def train(folder: str, epochs: int) -> dict[str, Any]:
        arguments = (f"--text={tmp_path / 'text'}", f"--context={CONTEXT}", "--width=16")
        command = [
            *(sys.executable, str(EXAMPLES / "fsdp2_char_lm.py"), *arguments, "--layers=1"),
            *(f"--epochs={epochs}", f"--checkpoints={tmp_path / folder}", "--every-steps=1000"),
        ]
        environment = {**os.environ, **ALONE, "OMP_NUM_THREADS": "1"}
        log = tmp_path / f"{folder}-{epochs}.log"
        alone = LocalNode(folder, command, environment, "", log, fork_server=shared_fork_server())
        assert alone.wait(2 * PATIENCE_S) == 0, alone.log_text()
        found = checkpoints.latest(tmp_path / folder).checkpoint
        assert found is not None and found.step == epochs * SAMPLES // 24
        state: dict[str, Any] = checkpoints.load(tmp_path / folder, found.name).state
        return state

    at_once = train("at-once", 2)
    half = train("in-two", 1)
    resumed = train("in-two", 2)
    for one, other in (
        (resumed["model"], at_once["model"]),
        (resumed["optimizer"]["state"], at_once["optimizer"]["state"]),
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not torch.equal(half["model"]["head.weight"], resumed["model"]["head.weight"])


def test_tensor_parallelism_continues_on_the_surviving_nodes(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    of = workload("tensor_parallel.py", f"--sequences={SAMPLES}", "--layers=1")
    reference = tmp_path / "undisturbed"
    reference.mkdir()
    undisturbed = train_undisturbed(reference, of, SCRIPT, ALONE)
    with job_of(etcd, tmp_path / "job", of, nproc=2) as job:
        first, last = job.start_nodes(2)
        generation = job.wait_training(nodes=2)
        saved = wait_saved(job)
        first.kill_worker(1)
        generation = job.wait_training(nodes=2, after_generation=generation)
        assert_resumed(job, generation, saved)
        saved = wait_saved(job)
        last.kill()
        generation = job.wait_training(nodes=1, after_generation=generation)
        assert_resumed(job, generation, saved)
        job.assert_finishes_whole(undisturbed)
        seen = samples_by_position(job)
        logs = "".join(node.log_text() for node in job.nodes)
    # Both ranks of a tensor-parallel group saw the same samples; a killed one may lack its last.
    pairs = [both for both in seen.values() if len(both) == 2]
    assert len(pairs) >= of.steps
    assert all(one == other for one, other in pairs)
    told = [
        json.loads(line[line.index("{") :]) for line in logs.splitlines() if "differences" in line
    ]
    assert told and all(d < 1e-12 for line in told for d in line["differences"].values())
