"""Nodes join, leave, fail and rejoin; surviving workers keep their processes."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from job_series import JobSeries, StartSeries
from training_job import SCRIPTS, TrainingJob, Workload, train_undisturbed

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.node import LocalNode, worker_pids
from elastic.testing.slowness import is_within
from elastic.testing.waiting import PATIENCE_S
from elastic.wire.messages import Cause, WorldState

SCRIPT = SCRIPTS / "phases.py"
WORKLOAD = Workload(samples=500, epochs=8, step_s=0.5)
# On an idle machine; the guarantee is 1 s. Otherwise workers would stay for minutes.
WORKERS_GONE_S = 6.0
# Detection of a worker's death by its agent, on an idle machine: immediate, or never.
HEARD_OF_WITHIN_S = 5.0


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


def tell(job: TrainingJob, point: str, node: str) -> Path:
    path = job.folder / f"die-{point}"
    staged = path.with_suffix(".new")
    staged.write_text(json.dumps({"node": node, "step": None}))
    return staged.rename(path)


def test_a_leaving_node_interrupts_no_step(job: TrainingJob, nodes: list[LocalNode]) -> None:
    with job.slow_steps():
        job.wait_progress(4)  # so that the step rate is known
        began, leaver = time.monotonic(), nodes[1]
        before = worker_pids([n for n in nodes if n is not leaver])
        generation = job.generation()
        leaver.terminate()
        world = job.wait_generation(generation + 1)
        assert leaver.wait(PATIENCE_S) == 75
        job.wait_training(nodes=2, after_generation=generation)
    assert world.cause is Cause.LEFT
    assert world.switch_at_step is not None
    assert worker_pids(job.running) == before
    assert job.journaled("world-fault", since_s=began) == []
    job.wait_for(lambda: not leaver.processes(), PATIENCE_S, "the end of the node's processes")


def test_a_joining_node_interrupts_no_step(job: TrainingJob) -> None:
    job.bring_to(2)
    with job.slow_steps():
        job.wait_progress(4)
        began, before = time.monotonic(), worker_pids(job.running)
        generation = job.generation()
        job.start_node()
        world = job.wait_generation(generation + 1)
        job.wait_training(nodes=3, after_generation=generation)
    assert world.cause is Cause.JOINED
    assert before.items() <= worker_pids(job.running).items()
    assert job.journaled("world-fault", since_s=began) == []


def test_the_job_continues_without_a_worker_that_raises_although_its_process_still_exists(
    job: TrainingJob, nodes: list[LocalNode]
) -> None:
    """The others change worlds once, as after a SIGKILL; its exception is the only cause."""
    began, before, generation = time.monotonic(), worker_pids(nodes), job.generation()
    raising = nodes[1].name
    job.wait_obeyed(tell(job, "raise", raising))
    job.wait_training(nodes=2, after_generation=generation)
    assert worker_pids(job.running) == before, "its exit handlers still run"
    (world,) = job.journaled("world-formed", since_s=began)
    assert world["reason"] == f"{raising} failed: ValueError: told to raise"
    (died,) = job.journaled("worker-died", since_s=began)
    assert (died["node"], died["pid"]) == (raising, before[raising])
    assert "phases.py" in died["reason"] and died["reason"].endswith("ValueError: told to raise")

    (job.folder / "may-end").touch()
    job.wait_training(nodes=3, after_generation=generation)
    after = worker_pids(job.running)
    assert {name for name in before if after[name] != before[name]} == {raising}
    assert "ValueError: told to raise" in nodes[1].log_text()


def accounts(
    job: TrainingJob, node: LocalNode, pid: int, since_s: float
) -> list[dict[str, Any]] | None:
    """The records of a worker's death: by its agent, or by torchrun only."""
    heard = [e for e in job.journaled("worker-died", since_s=since_s) if e["pid"] == pid]
    arrived = job.journaled("node-arrived", since_s=since_s)
    return heard or [e for e in arrived if e["node"] == node.name] or None


def test_the_agent_detects_the_death_of_a_worker_immediately(job: TrainingJob) -> None:
    """Independently of torchrun. Occasionally torchrun polls first and is the only one to record
    the death.
    """
    for _ in range(8):
        victim = job.bring_to(3)[2]
        generation, killed_s = job.generation(), time.monotonic()
        pid = victim.kill_worker()
        job.wait_training(nodes=3, after_generation=generation)
        (death, *_) = job.wait_for(
            partial(accounts, job, victim, pid, killed_s), PATIENCE_S, "an account of the death"
        )
        if death["event"] == "worker-died":
            break
        assert death["exit_code"] == -signal.SIGKILL
    assert "SIGKILL" in death["reason"]
    assert is_within(death["monotonic"] - killed_s, HEARD_OF_WITHIN_S)


def test_workers_end_with_their_agent(job: TrainingJob, nodes: list[LocalNode]) -> None:
    generation, victim = job.generation(), nodes[0]
    workers = [p.pid for p in victim.workers().values()]
    victim.kill_agent()
    assert is_within(victim.wait_gone(workers, PATIENCE_S), WORKERS_GONE_S)
    job.wait_training(nodes=2, after_generation=generation)


def pause_saved(job: TrainingJob, lost: list[LocalNode]) -> int:
    """Kill enough nodes to pause the job; returns the survivor's last step, which is in a
    checkpoint.

    The survivor's step counts: it may complete a step after the world is paused, and a killed node
    may have completed a step that no other node did.
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


def test_below_min_nodes_the_job_saves_pauses_and_resumes(
    job: TrainingJob, nodes: list[LocalNode]
) -> None:
    survivor = nodes[0]
    before = worker_pids([survivor])
    pause_saved(job, nodes[1:])
    generation = job.generation()
    job.start_nodes(2)
    job.wait_training(nodes=3, after_generation=generation)
    assert worker_pids([survivor]) == before


@pytest.mark.slow
def test_a_paused_job_resumes_after_the_death_of_its_last_node(
    job: TrainingJob, nodes: list[LocalNode]
) -> None:
    last = pause_saved(job, nodes[1:])
    generation = job.generation()
    nodes[0].kill()
    job.start_nodes(3)
    job.wait_training(nodes=3, after_generation=generation)
    new = [s.step for s in job.ledger().steps if s.generation > generation]
    assert min(new) == last + 1


def test_sigterm_to_a_single_worker_ends_it(job: TrainingJob, nodes: list[LocalNode]) -> None:
    """Its agent has no leave request: it is handled like any other death."""
    generation, before = job.generation(), worker_pids(nodes)
    os.kill(before[nodes[1].name], signal.SIGTERM)
    job.wait_for(
        lambda: worker_pids(nodes).get(nodes[1].name) not in (None, before[nodes[1].name]),
        PATIENCE_S,
        "another worker in its place",
    )
    job.wait_training(nodes=3, after_generation=generation)
    after = worker_pids(job.running)
    assert {name for name in before if after[name] != before[name]} == {nodes[1].name}


def test_sigterm_to_all_processes_of_a_node_is_a_graceful_leave(
    job: TrainingJob, nodes: list[LocalNode]
) -> None:
    """Some schedulers signal every process of a node, in any order."""
    generation, leaver = job.generation(), nodes[2]
    worker = leaver.workers()[0].pid
    with job.slow_steps():
        job.wait_progress(2)
        began = time.monotonic()
        os.kill(worker, signal.SIGTERM)
        leaver.terminate()
        assert leaver.wait(PATIENCE_S) == 75
        job.wait_training(nodes=2, after_generation=generation)
    # A worker waits 0.3 s for its agent's answer on the meaning of the signal. If a slow machine
    # delays the answer further, the worker dies, as from any other SIGTERM.
    died = [e for e in job.journaled("worker-died", since_s=began) if e["pid"] == worker]
    assert died or job.journaled("world-fault", since_s=began) == []


def test_recovery_from_a_death_waits_for_etcd(
    job: TrainingJob, nodes: list[LocalNode], etcd: EmbeddedEtcd
) -> None:
    """Training continues without etcd; a recovery waits for etcd, and no longer."""
    generation = job.generation()
    etcd.kill()
    job.wait_progress(5)
    nodes[1].kill()
    survivors = worker_pids([nodes[0], nodes[2]])
    time.sleep(2.0)
    etcd.start()
    job.wait_training(nodes=2, after_generation=generation)
    assert worker_pids(job.running) == survivors


def test_the_job_ends_with_the_weights_of_an_undisturbed_run(
    job: TrainingJob, nodes: list[LocalNode], reference: Path
) -> None:
    job.assert_finishes_whole(reference)
    job.assert_only_the_outcome_is_stored()
