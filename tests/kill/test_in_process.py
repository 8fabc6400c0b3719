"""Nodes join, leave, fail and come back; workers that have not died keep their processes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from job_series import JobSeries, StartSeries
from training_job import SCRIPTS, TrainingJob, Workload, train_undisturbed

from elastic.membership.records import Cause, WorldState
from elastic.store.embedded.etcd import EmbeddedEtcd
from elastic.testing.journal import read_journal
from elastic.testing.node import LocalNode
from elastic.testing.slowness import is_within
from elastic.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "phases.py"
WORKLOAD = Workload(samples=500, epochs=13, step_s=0.5)
WORKERS_GONE_S = 3.0  # on an idle machine; promised is 1 s
HEARD_OF_WITHIN_S = 1.0  # a worker's death, by its agent, on an idle machine


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("in-process-alone"), WORKLOAD, SCRIPT)


@pytest.fixture(scope="module")
def jobs(etcd: EmbeddedEtcd, start_series: StartSeries, reference: Path) -> JobSeries[TrainingJob]:
    return start_series(
        lambda folder: TrainingJob(
            [etcd.endpoint],
            folder,
            script=SCRIPT,
            workload=WORKLOAD,
            min_nodes=2,
            max_nodes=3,
        ),
        reference,
    )


def pids(nodes: list[LocalNode]) -> dict[str, int]:
    return {node.name: node.workers()[0].pid for node in nodes if node.workers()}


def events(job: TrainingJob, name: str, since_s: float = 0.0) -> list[dict[str, Any]]:
    """Events of that name since a moment on the monotonic clock."""
    found = read_journal(job.folder / "journal")
    return [e for e in found if e["event"] == name and e["monotonic"] >= since_s]


def tell(job: TrainingJob, point: str, node: str) -> Path:
    path = job.folder / f"die-{point}"
    staged = path.with_suffix(".new")
    staged.write_text(json.dumps({"node": node, "step": None}))
    return staged.rename(path)


def test_leaving_interrupts_no_step(job: TrainingJob, nodes: list[LocalNode]) -> None:
    job.wait_progress(10)  # so that it is known how long a step takes
    began, leaver = time.monotonic(), nodes[1]
    before = pids([n for n in nodes if n is not leaver])
    generation = job.generation()
    leaver.terminate()
    assert leaver.wait(PATIENCE_S) == 75
    job.wait_training(nodes=2, after_generation=generation)
    world = job.world()
    assert world is not None
    assert world.cause is Cause.LEFT
    assert world.switch_at_step is not None
    assert pids(job.running) == before
    assert events(job, "world-fault", began) == []
    assert leaver.processes() == []


def test_joining_interrupts_no_step(job: TrainingJob) -> None:
    job.bring_to(2)
    for node in job.running[2:]:
        node.kill()
    generation = job.wait_training(nodes=2)
    began, before = time.monotonic(), pids(job.running)
    job.start_node()
    job.wait_training(nodes=3, after_generation=generation)
    world = job.world()
    assert world is not None
    assert world.cause is Cause.JOINED
    assert before.items() <= pids(job.running).items()
    assert events(job, "world-fault", began) == []


def test_an_exception_of_the_script_is_no_lost_peer(
    job: TrainingJob, nodes: list[LocalNode]
) -> None:
    """It surfaces with its traceback, its node restarts, the others go on."""
    before, generation = pids(nodes), job.generation()
    order = tell(job, "raise", nodes[1].name)
    job.wait_training(nodes=3, after_generation=generation + 1)
    assert not order.exists()
    assert "ValueError: told to raise" in nodes[1].log_text()
    after = pids(job.running)
    assert {name for name in before if after[name] != before[name]} == {nodes[1].name}
    assert any("told to raise" in e["reason"] for e in events(job, "world-formed"))


def test_the_agent_hears_of_a_death_at_once(job: TrainingJob) -> None:
    """By itself. Now and then torchrun looks first, and the death is in its account only."""
    for _ in range(8):
        victim = job.bring_to(3)[2]
        generation, killed_s = job.generation(), time.monotonic()
        pid = victim.kill_worker()
        job.wait_training(nodes=3, after_generation=generation + 1)
        died = [e for e in events(job, "worker-died", killed_s) if e["pid"] == pid]
        if died and "SIGKILL" in died[0]["reason"]:
            break
        again = [e for e in events(job, "node-arrived", killed_s) if e["node"] == victim.name]
        assert [e["exit_code"] for e in again] == [-signal.SIGKILL]
    (death,) = died
    assert "SIGKILL" in death["reason"]
    assert is_within(death["monotonic"] - killed_s, HEARD_OF_WITHIN_S)


def test_workers_end_with_their_agent(job: TrainingJob, nodes: list[LocalNode]) -> None:
    generation, victim = job.generation(), nodes[0]
    workers = [p.pid for p in victim.workers().values()]
    victim.kill_agent()
    assert is_within(victim.wait_gone(workers, PATIENCE_S), WORKERS_GONE_S)
    job.wait_training(nodes=2, after_generation=generation)


def pause_saved(job: TrainingJob, lost: list[LocalNode]) -> int:
    """Kill so many that the job pauses; the last step of who is left, which is in a checkpoint.

    It is the one to tell: it may be ending a step while the world is paused already, and one that
    was killed may have completed a step that nobody else did.
    """
    for node in lost:
        node.kill()

    def paused_at() -> int | None:
        world = job.world()
        if world is None or world.state is not WorldState.PAUSED:
            return None
        return next((s.step for s in job.ledger().starts if s.generation == world.generation), None)

    begin = job.wait_for(paused_at, PATIENCE_S, "a paused world")
    job.wait_for(
        lambda: list((job.folder / "checkpoints").glob(f"step-{begin:09d}.*")) or None,
        PATIENCE_S,
        f"a checkpoint of step {begin}",
    )
    return begin - 1


def test_below_the_minimum_the_job_pauses_saved_and_goes_on(
    job: TrainingJob, nodes: list[LocalNode]
) -> None:
    survivor = nodes[0]
    before = pids([survivor])
    pause_saved(job, nodes[1:])
    job.start_nodes(2)
    job.wait_training(nodes=3, after_generation=job.generation())
    assert pids([survivor]) == before


def test_the_last_one_of_a_paused_job_dies_too(job: TrainingJob, nodes: list[LocalNode]) -> None:
    last = pause_saved(job, nodes[1:])
    generation = job.generation()
    nodes[0].kill()
    job.start_nodes(3)
    job.wait_training(nodes=3, after_generation=generation)
    new = [s.step for s in job.ledger().steps if s.generation > generation]
    assert min(new) == last + 1


def test_sigterm_to_a_worker_alone_ends_it(job: TrainingJob, nodes: list[LocalNode]) -> None:
    """Its agent knows nothing of leaving: it is like any other death."""
    generation, before = job.generation(), pids(nodes)
    os.kill(before[nodes[1].name], signal.SIGTERM)
    job.wait_training(nodes=3, after_generation=generation + 1)
    after = pids(job.running)
    assert {name for name in before if after[name] != before[name]} == {nodes[1].name}


def test_sigterm_to_the_whole_node_is_leaving(job: TrainingJob, nodes: list[LocalNode]) -> None:
    """Some schedulers signal every process of a node, and in any order."""
    began, generation, leaver = time.monotonic(), job.generation(), nodes[2]
    os.kill(leaver.workers()[0].pid, signal.SIGTERM)
    leaver.terminate()
    assert leaver.wait(PATIENCE_S) == 75
    job.wait_training(nodes=2, after_generation=generation)
    assert events(job, "world-fault", began) == []


def test_a_death_while_etcd_is_away(
    job: TrainingJob, nodes: list[LocalNode], etcd: EmbeddedEtcd
) -> None:
    """Training goes on without etcd; a death waits for it, and no longer."""
    generation = job.generation()
    etcd.kill()
    job.wait_progress(20)
    nodes[1].kill()
    survivors = pids([nodes[0], nodes[2]])
    time.sleep(2.0)
    etcd.start()
    job.wait_training(nodes=2, after_generation=generation)
    assert pids(job.running) == survivors


def test_the_job_ends_as_if_nothing_had_happened(
    job: TrainingJob, nodes: list[LocalNode], reference: Path
) -> None:
    job.assert_finishes_whole(reference)
    left = {entry.key for entry in job.store.list(job.keys.root).entries}
    assert left == {job.keys.world, job.keys.done, job.keys.secret}
