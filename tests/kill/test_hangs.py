"""Workers that are alive but make no progress: detection, attribution, recovery; false alarms."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import shared_gpu
from swapping import SwappingJob, swap_space, why_unavailable
from training_job import PLAIN, SCRIPTS, TrainingJob, Workload

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.node import LocalNode
from elastic.testing.slowness import is_within
from elastic.testing.waiting import PATIENCE_S, eventually

SCRIPT = SCRIPTS / "hangs.py"
# Never trained to its end: even on a slow machine, its tests finish before its slower second half.
WORKLOAD = Workload(samples=2400, epochs=1000, step_s=0.05, save_every=100)
FREEZE_S = 5.0
SOAK_S = float(os.environ.get("FALSE_ALARM_SOAK_S", "1800"))
SWAPS_S = 10.0
WHY_NO_SWAP = why_unavailable()
# The duration of legitimate long operations, in seconds: above hang_timeout_s in the suite,
# realistic in the soak test.
COMPRESSED = {"evaluation": 10.0, "before-forward": 5.0, "garbage": 5.0, "checkpoint": 7.0}
REAL = {"evaluation": 30.0, "before-forward": 30.0, "garbage": 10.0, "checkpoint": 20.0}
LEFT_ALONE_S = 10.0  # twice the detection time of a hang
# Twice the guarantee, because other tests use the machine, too (benchmarks/hang.py measures it):
# for a stopped worker; for an endless loop and a skipped collective, in short steps; for a node.
STOPPED_S = 4.0
HUNG_S = 10.0
NO_BATCH_S = 70.0  # the budget of a wait for a batch is ten times that of a step
LEASE_WITHIN_S = 11.0
LOST_S = 50.0  # four times the detection time of a hang, doubled, too
# `make gpu-kills`
ON_DEVICE = os.environ.get(shared_gpu.SWITCH) == "1" and torch.cuda.is_available()


@pytest.fixture(scope="module")
def job(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingJob]:
    with TrainingJob(
        [etcd.endpoint],
        tmp_path_factory.mktemp("hangs"),
        script=SCRIPT,
        workload=WORKLOAD,
        min_nodes=2,
        max_nodes=3,
    ) as job:
        yield job


def found(job: TrainingJob, since_s: float) -> list[dict[str, Any]]:
    """Verdicts since a time on the monotonic clock. They are logged after their effects."""
    return job.journaled("hang-found", since_s=since_s)


def only_verdict(job: TrainingJob, since_s: float) -> dict[str, Any]:
    """The only verdict since a time on the monotonic clock, once it is logged."""
    job.wait_event("hang-found", since_s=since_s)
    (verdict,) = found(job, since_s)
    return verdict


def wait_reported(job: TrainingJob, verdict: dict[str, Any], *texts: str) -> str:
    """The verdict's report, once it contains all of these: stacks of other nodes arrive later."""
    path = Path(verdict["report"])

    def reported() -> str | None:
        report = path.read_text()
        return report if all(text in report for text in texts) else None

    return job.wait_for(reported, PATIENCE_S, f"{texts} in {path}")


def pids(nodes: list[LocalNode]) -> dict[str, int]:
    return {node.name: node.workers()[0].pid for node in nodes}


def order(job: TrainingJob, kind: str, node: str, takes_s: float = 0.0) -> None:
    path = job.folder / f"hang-{kind}"
    staged = path.with_suffix(".new")
    staged.write_text(f"{node} {takes_s}")
    staged.rename(path)


def wait_taken(job: TrainingJob, kind: str) -> tuple[int, float]:
    """The process that carried out the order, and the time."""
    path = job.folder / f"done-{kind}"

    def confirmed() -> tuple[int, float] | None:
        words = path.read_text().split() if path.exists() else []
        return (int(words[0]), float(words[1])) if len(words) == 2 else None

    return job.wait_for(confirmed, PATIENCE_S, f"a worker that obeys {kind}")


def paused_s(job: TrainingJob, generation: int) -> float:
    """The time between the last step before ``generation`` and the first one in it."""
    steps = job.ledger().steps
    before = max(s.time_s for s in steps if s.generation < generation)
    return min(s.time_s for s in steps if s.generation >= generation) - before


def make_hang(job: TrainingJob, kind: str, index: int = 1) -> tuple[dict[str, Any], float, int]:
    """Make a worker hang; returns the verdict, the pause, and the pid of the worker."""
    nodes = job.bring_to(3)
    job.wait_progress(30)
    victim, generation, since_s = nodes[index], job.generation(), time.monotonic()
    pid = victim.workers()[0].pid
    if kind == "stop":
        os.kill(pid, signal.SIGSTOP)
    else:
        order(job, kind, victim.name)
    wait_trains_on(job, generation, f"after the hang ({kind})")
    return only_verdict(job, since_s), paused_s(job, generation + 1), pid


def wait_trains_on(job: TrainingJob, generation: int, when: str) -> None:
    """Wait until steps are completed in a later world."""
    job.wait_for(lambda: job.training_nodes()[0] > generation, PATIENCE_S, f"training {when}")


@pytest.mark.parametrize(
    "index",
    [1, pytest.param(0, marks=pytest.mark.slow)],  # 0: also the host of the world's store
)
def test_a_stopped_worker_is_replaced_within_seconds(job: TrainingJob, index: int) -> None:
    verdict, pause_s, pid = make_hang(job, "stop", index)
    assert verdict["kind"] == "stopped"
    assert "state T" in verdict["reason"]
    assert is_within(pause_s, STOPPED_S)
    wait_reported(job, verdict, f"pid {pid}")


@pytest.mark.parametrize(
    "kind",
    ["sleep", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("loop", "locked"))],
)
def test_a_rank_absent_from_the_collective_is_the_culprit(job: TrainingJob, kind: str) -> None:
    verdict, pause_s, pid = make_hang(job, kind)
    assert (verdict["kind"], verdict["action"]) == ("absent", "kill")
    assert "the forward and backward pass" in verdict["reason"]
    says = "endless loop" if kind == "loop" else "asleep"
    assert says in verdict["reason"]
    assert is_within(pause_s, HUNG_S)
    # The stacks of the culprit and its peers.
    wait_reported(job, verdict, f"pid {pid}", "in hang", "in finish")


@pytest.mark.parametrize("kind", ["skip", pytest.param("order", marks=pytest.mark.slow)])
def test_mismatched_collectives_are_aborted_and_the_world_is_reformed(
    job: TrainingJob, kind: str
) -> None:
    verdict, pause_s, pid = make_hang(job, kind)
    assert wait_taken(job, kind)[0] == pid
    if ON_DEVICE:
        # NCCL's barrier blocks the script in C++: only the recorder knows who is in which call.
        assert verdict["kind"] in ("mismatch", "lost-message")
        assert verdict["action"] == "abort-and-reform"
        assert is_within(pause_s, LOST_S)
        wait_reported(job, verdict, "flight recorder", "nccl")
        return
    assert (verdict["kind"], verdict["action"]) == ("mismatch", "abort-and-reform")
    assert is_within(pause_s, HUNG_S)
    # The findings of torch's flight recorder, once it covers the other nodes' ranks.
    # all_reduce of gradients, or all_gather after a step whose state is compared (powers of two).
    called = ("all_", "barrier") if kind == "skip" else ("barrier", "all_")
    culprit_called = f"rank {verdict['ranks'][0]} called {called[0]}"
    report = wait_reported(job, verdict, "differs", culprit_called, f"called {called[1]}")
    differs = [line for line in report.splitlines() if culprit_called in line]
    assert any("differs" in line and f"called {called[1]}" in line for line in differs), report
    assert any(pid == n.workers()[0].pid for n in job.running), "nobody was ended"


def test_a_deadlocked_data_worker_is_named_in_the_verdict(job: TrainingJob) -> None:
    verdict, _, pid = make_hang(job, "loader")
    assert (verdict["kind"], verdict["action"]) == ("absent", "kill")
    assert "its data loader returns no batch (data workers in state" in verdict["reason"]
    wait_reported(job, verdict, "in __getitem__")  # the data worker's stack
    # The agent's record, or that of torchrun if it polls its workers first.
    job.wait_for(lambda: tells(accounts(job, pid), verdict), PATIENCE_S, "the reason of the death")


def tells(records: list[str], verdict: dict[str, Any]) -> bool:
    """Whether a record contains the reason of the verdict and the path of the report."""
    report = f"; report: {verdict['report']}"
    return any(one.startswith(verdict["reason"]) and one.endswith(report) for one in records)


def accounts(job: TrainingJob, pid: int) -> list[str]:
    """The reasons of a worker's death, as recorded by its agent and by torchrun."""
    died = [e["reason"] for e in job.journaled("worker-died") if e["pid"] == pid]
    return died + [e["failure"] for e in job.journaled("node-arrived") if e["failure"]]


@pytest.mark.slow
@pytest.mark.parametrize("index", [1, 0])  # 0: the leader's node, and the host of the world's store
def test_a_death_before_the_verdict_does_not_delay_it_by_further_worlds(
    job: TrainingJob, index: int
) -> None:
    """A data worker hangs, and another node's worker dies while its rank still has batches: it
    waits for the first batch of the next world, from the same data worker."""
    nodes = job.bring_to(3)
    job.wait_progress(30)
    hung, killed = nodes[index], nodes[2]
    generation, since_s = job.generation(), time.monotonic()
    pid = hung.workers()[0].pid
    (job.folder / "done-loader").unlink(missing_ok=True)
    order(job, "loader", hung.name)
    wait_taken(job, "loader")
    os.kill(killed.workers()[0].pid, signal.SIGKILL)
    wait_trains_on(job, generation, "after the hang and the death")
    verdict = only_verdict(job, since_s)
    assert (verdict["kind"], verdict["action"]) == ("absent", "kill")
    assert "its data loader returns no batch" in verdict["reason"]
    assert all(worker.pid != pid for worker in hung.workers().values())
    assert is_within(paused_s(job, verdict["generation"] + 1), NO_BATCH_S)


@pytest.mark.slow
def test_a_receive_without_a_sender_is_a_lost_message(job: TrainingJob) -> None:
    job.bring_to(3)
    job.wait_progress(30)
    generation, since_s = job.generation(), time.monotonic()
    (job.folder / "lost-message").touch()
    wait_trains_on(job, generation, "after that")
    verdict = only_verdict(job, since_s)
    assert (verdict["kind"], verdict["action"]) == ("lost-message", "abort-and-reform")
    assert "all 3 ranks wait in recv" in verdict["reason"]


@pytest.mark.slow
def test_a_worker_at_a_debugger_prompt_is_not_killed(job: TrainingJob) -> None:
    """The prompt stays open for longer than any step budget."""
    nodes = job.bring_to(3)
    job.wait_progress(30)
    victim, generation, since_s = nodes[1], job.generation(), time.monotonic()
    os.mkfifo(job.folder / "answers")
    order(job, "breakpoint", victim.name)
    with (job.folder / "answers").open("w") as answers:
        job.wait_event("hang-found", since_s=since_s)  # the message to the user
        time.sleep(LEFT_ALONE_S)
        assert {(v["kind"], v["action"]) for v in found(job, since_s)} == {
            ("debugged", "leave-alone")
        }
        answers.write("c\n")
    job.wait_progress(30)
    assert job.generation() == generation, "nobody was ended"
    assert "is being debugged" in victim.log_text()


@pytest.mark.slow
def test_the_others_train_on_while_sigkill_does_not_end_a_worker(job: TrainingJob) -> None:
    """Before the long operations, after which each phase may take as long again."""
    nodes = job.bring_to(3)
    job.wait_progress(30)
    victim, generation = nodes[1], job.generation()
    pid = victim.workers()[0].pid
    order(job, "sleep", victim.name)
    wait_taken(job, "sleep")
    time.sleep(2.0)  # not in the middle of a garbage collection, which has a budget of its own
    with blocked_in_the_kernel(pid):
        job.wait_training(nodes=2, after_generation=generation)
        assert job.training_nodes()[1] == {n.name for n in nodes if n is not victim}
        world = job.world()
        assert world is not None and f"{victim.name} failed: hang: rank " in world.reason
        job.wait_for(
            lambda: f"SIGKILL has had no effect on pid {pid}" in victim.log_text() or None,
            PATIENCE_S,
            "the reason in the node's log",
        )
        assert victim.running and Path(f"/proc/{pid}").exists()
        job.wait_progress(10)
    job.wait_training(nodes=3, after_generation=job.generation())
    assert victim.running, "it restarts its workers once that one has ended"


@pytest.fixture
def load() -> Iterator[None]:
    """A machine at 100 %."""
    burning = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    yield
    for process in burning:
        process.kill()
        process.wait()


def send(pid: int, signum: int) -> None:
    """Data workers start and end with epochs."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def run_long_operations(job: TrainingJob, node: LocalNode, long_s: Mapping[str, float]) -> None:
    """Run all legitimate long operations, one after the other."""
    for kind, takes_s in long_s.items():
        (job.folder / f"done-{kind}").unlink(missing_ok=True)
        order(job, kind, node.name, takes_s)
        wait_taken(job, kind)
        job.wait_progress(10)
    # Agents stop first and continue last: an agent that saw its worker stopped for two seconds,
    # because the machine is busy, would rightly kill it.
    agents = {node.pid for node in job.running}
    frozen = sorted((p.pid for p in job.processes()), key=lambda pid: pid not in agents)
    try:
        for pid in frozen:
            send(pid, signal.SIGSTOP)
        time.sleep(FREEZE_S)
    finally:
        for pid in reversed(frozen):
            send(pid, signal.SIGCONT)
    job.wait_progress(50)


@pytest.mark.slow
def test_legitimate_long_operations_are_not_hangs(job: TrainingJob) -> None:
    """Evaluation and a checkpoint on one rank, a garbage collection, a freeze of the whole job."""
    nodes = job.bring_to(3)
    job.wait_progress(30)
    since_s, workers = time.monotonic(), pids(nodes)
    run_long_operations(job, nodes[0], COMPRESSED)
    assert found(job, since_s) == []
    assert pids(job.running) == workers


def swap(job: SwappingJob) -> int:
    """Temporarily limit its memory to less than it uses; returns the number of pages read from
    disk.
    """
    before = job.memory.major_faults()
    job.memory.limit_to(0.6)
    time.sleep(SWAPS_S)
    job.wait_progress(10)
    job.memory.lift_limit()
    return job.memory.major_faults() - before


@pytest.mark.soak
@pytest.mark.timeout(2 * SOAK_S + 900)
@pytest.mark.skipif(bool(WHY_NO_SWAP), reason=WHY_NO_SWAP)
def test_long_operations_raise_no_false_alarm_within_half_an_hour(
    etcd: EmbeddedEtcd, tmp_path: Path, load: None
) -> None:
    """Legitimate long operations and swapping, in turn, repeatedly."""
    workload = replace(WORKLOAD, epochs=1000)
    with (
        swap_space(tmp_path),
        SwappingJob(
            [etcd.endpoint],
            tmp_path,
            script=SCRIPT,
            workload=workload,
            min_nodes=2,
            max_nodes=3,
        ) as job,
    ):
        nodes = job.bring_to(3)
        workers, since_s, passed_s = pids(nodes), time.monotonic(), 0.0
        while passed_s < SOAK_S:
            faults = swap(job)
            assert faults > 0, "nothing was swapped"
            run_long_operations(job, nodes[0], REAL)
            passed_s = time.monotonic() - since_s
            print(f"{passed_s:.0f} s without an alarm, {faults} pages from the disk", flush=True)
            assert found(job, since_s) == []
        assert pids(job.running) == workers


FREEZER = Path("/sys/fs/cgroup/freezer")  # of cgroup v1, whose frozen processes are in state D


@contextlib.contextmanager
def blocked_in_the_kernel(pid: int) -> Iterator[None]:
    """For the time of the block, SIGKILL does not end this process, as on a dead NFS server."""
    group = FREEZER / f"elastic-test-{pid}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
    except OSError as error:
        pytest.skip(f"no freezer of cgroup v1: {error}")
    try:
        yield
    finally:
        (group / "freezer.state").write_text("THAWED")
        eventually(lambda: not (group / "cgroup.procs").read_text(), "the end of the process")
        group.rmdir()


@pytest.mark.slow
def test_a_stopped_node_is_lost_when_its_lease_expires(job: TrainingJob) -> None:
    """Its agent is stopped, too, so it cannot detect the hang."""
    nodes = job.bring_to(3)
    job.wait_progress(30)
    generation, victim = job.generation(), nodes[1]
    victim.pause()
    wait_trains_on(job, generation, "without the node")
    pause_s = paused_s(job, generation + 1)
    victim.kill()
    assert is_within(pause_s, LEASE_WITHIN_S)


@pytest.mark.slow
def test_a_stopped_worker_of_an_unmodified_script_is_replaced(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """There is no progress page; the process state in the kernel suffices."""
    with TrainingJob(
        [etcd.endpoint], tmp_path, script=PLAIN, workload=Workload(), min_nodes=1, max_nodes=2
    ) as plain:
        plain.start_nodes(2)
        generation = plain.wait_training(nodes=2)
        stopped = plain.nodes[1].workers()[0].pid
        os.kill(stopped, signal.SIGSTOP)
        plain.wait_training(nodes=2, after_generation=generation)
        verdict = only_verdict(plain, 0.0)
        assert (verdict["kind"], verdict["node"]) == ("stopped", "node1")
        assert "is stopped: its process is in state T" in plain.nodes[1].log_text()
        # Also in torchrun's own record.
        plain.wait_event("node-arrived", lambda e: "state T" in (e["failure"] or ""))
