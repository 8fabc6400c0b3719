"""Consecutive windows of a worker are merged only if they belong to the same activity."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from kit.made_up_run import START_S, MadeUpProcess, write_run

from elastic.report.model import RunReport, report_of
from elastic.telemetry.goodput import (
    UNREPORTED_S,
    Activity,
    Goodput,
    goodput_of_run,
)
from elastic.telemetry.reader import merge, read_folder, run_of


def goodput_in(folder: Path, *processes: MadeUpProcess) -> Goodput:
    for process in processes:
        (folder / process.path).write_text("\n".join(process.lines) + "\n")
    return goodput_of_run(run_of(merge(*read_folder(folder))))


def trained(restored_at: int) -> MadeUpProcess:
    """A world of 100 windows of 5 s and 50 steps; a second one resumes at step ``restored_at``."""
    worker = MadeUpProcess("node-0", "worker")
    place = {"rank": 0, "generation": 1}
    worker.write(10.0, "world-joined", step=0, duration_s=0.0, **place)
    worker.window(10.1, 0.1, 1, 1, ended="first-step", **place)
    for number in range(1, 101):
        worker.window(10.1 + 5 * number, 5.0, 1 + 50 * number, 50, ended="due", **place)
    worker.window(511.1, 1.0, 5001, 0, open_s=1.0, ended="fault", **place)
    place["generation"] = 2
    worker.write(520.0, "world-joined", step=restored_at, duration_s=0.0, **place)
    worker.write(520.0, "recovered", duration_s=8.9, wait_s=8.9, step=restored_at, **place)
    worker.window(520.1, 0.1, restored_at + 1, 1, ended="first-step", **place)
    worker.window(620.1, 100.0, restored_at + 1001, 1000, ended="close", **place)
    worker.write(620.1, "run-closed", clean=True, **place)
    return worker


@pytest.mark.parametrize(
    ("restored_at", "recomputed_s"), [(5001, 0.0), (2501, 250.0), (2526, 247.5), (1, 500.0)]
)
def test_repeated_steps_count_as_recomputed_from_the_restored_step(
    tmp_path: Path, restored_at: int, recomputed_s: float
) -> None:
    found = goodput_in(tmp_path, trained(restored_at))
    seconds = found.breakdown.seconds
    # 5 % of a window is data wait, which is accounted for separately.
    assert seconds.get(Activity.RECOMPUTED, 0.0) == pytest.approx(0.95 * recomputed_s, abs=0.02)
    assert (found.recomputed_steps > 0) == (Activity.RECOMPUTED in seconds)
    assert seconds[Activity.PRODUCTIVE] == pytest.approx(0.95 * (600.2 - recomputed_s), abs=0.03)
    assert seconds[Activity.DATA] == pytest.approx(0.05 * 600.2, abs=0.02)
    assert found.breakdown.total_s == pytest.approx(found.duration_s, rel=1e-9)
    assert found.recomputed_steps == 5001 - restored_at


def test_windows_are_merged_into_few_stretches(tmp_path: Path) -> None:
    found = goodput_in(tmp_path, trained(5001))
    (lane,) = found.nodes[0].workers
    assert len(lane.stretches) < 15
    assert all(b.start_s == a.end_s for a, b in pairwise(lane.stretches))


LAG_S = 0.02  # of the steps of 0.1 s


def with_a_straggler(cause: str, *, recovers: bool) -> list[MadeUpProcess]:
    """Two nodes report windows of 5 s and 50 steps until 510 s; rank 1 is a straggler."""
    agent = MadeUpProcess("node-0", "agent")
    verdict = {"rank": 1, "generation": 1}
    agent.write(10.0, "world-entered", generation=1)
    agent.write(100.1, "straggler-found", cause=cause, lag_s=LAG_S, **verdict)
    if recovers:
        agent.write(300.1, "straggler-recovered", **verdict)
    agent.write(510.1, "job-ended")
    workers = []
    for rank in (0, 1):
        worker = MadeUpProcess(f"node-{rank}", "worker")
        place = {"rank": rank, "generation": 1}
        worker.write(10.0, "world-joined", step=0, duration_s=0.0, **place)
        worker.window(10.1, 0.1, 1, 1, ended="first-step", **place)
        for number in range(1, 101):
            worker.window(10.1 + 5 * number, 5.0, 1 + 50 * number, 50, ended="due", **place)
        worker.write(510.1, "run-closed", clean=True, **place)
        workers.append(worker)
    return [agent, *workers]


@pytest.mark.parametrize(
    ("cause", "recovers", "straggling_s"),
    [
        ("compute", True, 0.2 * 200),
        ("compute", False, 0.2 * 410),
        ("data wait", True, 0.2 * 200 / 2),  # the straggler's own time already counts as data wait
    ],
)
def test_waiting_for_a_straggler_is_a_separate_loss(
    tmp_path: Path, cause: str, recovers: bool, straggling_s: float
) -> None:
    found = goodput_in(tmp_path, *with_a_straggler(cause, recovers=recovers))
    seconds = found.breakdown.seconds
    assert seconds[Activity.STRAGGLING] == pytest.approx(straggling_s, abs=0.5)
    assert seconds[Activity.PRODUCTIVE] == pytest.approx(0.95 * 500 - straggling_s, abs=0.6)
    assert found.breakdown.total_s == pytest.approx(found.duration_s, rel=1e-9)


def test_a_straggler_loss_is_limited_to_the_step_time(tmp_path: Path) -> None:
    agent, *workers = with_a_straggler("compute", recovers=False)
    agent.write(200.1, "straggler-found", rank=0, generation=1, cause="compute", lag_s=1e9)
    seconds = goodput_in(tmp_path, agent, *workers).breakdown.seconds
    assert seconds[Activity.PRODUCTIVE] >= 0
    assert seconds[Activity.STRAGGLING] <= 0.95 * 430


@pytest.mark.parametrize("is_killed", [False, True])
def test_time_after_the_end_of_a_worker_is_accounted_for(tmp_path: Path, is_killed: bool) -> None:
    agent, worker = MadeUpProcess("node-0", "agent"), MadeUpProcess("node-0", "worker")
    place = {"rank": 0, "generation": 1}
    agent.write(10.0, "world-entered", generation=1)
    worker.write(10.0, "world-joined", step=0, duration_s=0.0, **place)
    worker.window(10.1, 0.1, 1, 1, ended="first-step", **place)
    worker.window(110.1, 100.0, 1001, 1000, ended="due" if is_killed else "close", **place)
    if not is_killed:
        worker.write(110.1, "run-closed", clean=True, **place)
    for at_s in (112.1, 115.1, 142.1):  # it cannot record the end of the job in etcd
        agent.write(at_s, "store-problem", error="no etcd endpoint answers")
    agent.write(150.1, "journal-closed")
    found = goodput_in(tmp_path, agent, worker)
    seconds = found.breakdown.seconds
    unreported_s = UNREPORTED_S if is_killed else 0.0
    afterwards = Activity.DETECTION if is_killed else Activity.SHUTDOWN
    assert seconds.get(Activity.UNREPORTED, 0.0) == pytest.approx(unreported_s, abs=0.01)
    assert seconds[afterwards] == pytest.approx(40.0 - unreported_s, abs=0.01)
    assert found.breakdown.total_s == pytest.approx(found.duration_s, rel=1e-9)


def run_until(folder: Path, at_s: float) -> RunReport:
    """The report of the made-up run, read at ``at_s``."""
    for process in write_run(folder):
        lines = [text for text in process.lines if json.loads(text)["time"] <= START_S + at_s]
        (folder / process.path).write_text("\n".join(lines) + "\n")
    return report_of(merge(*read_folder(folder)))


@pytest.mark.parametrize(
    ("at_s", "is_over", "said"),
    [
        (40.9, [], "There were no interruptions."),
        (42.0, [False], "paused training for 3.0 s. No step was committed since the last failure."),
        # The first step is committed, but no window follows it.
        (44.0, [True], "1 failure paused training for"),
        (119.9, [True, True], "The job is still running, or ended without a final event"),
        (120.9, [True, True], "All workers finished, but no agent recorded the end of the job"),
        (121.2, [True, True], "The job succeeded after 2 min 1 s."),
    ],
)
def test_a_failure_is_an_incident_before_and_after_recovery(
    tmp_path: Path, at_s: float, is_over: list[bool], said: str
) -> None:
    report = run_until(tmp_path, at_s)
    assert [incident.is_over for incident in report.incidents] == is_over
    assert said in report.sentence
    assert ("No step was committed" in report.sentence) == (False in is_over)
    assert report.goodput.breakdown.total_s == pytest.approx(report.goodput.duration_s, rel=1e-9)


@pytest.mark.parametrize("leave", [True, False])
def test_a_job_that_all_nodes_left_is_neither_running_nor_failed(
    tmp_path: Path, leave: bool
) -> None:
    """As after ``elastic stop``, in the middle of a world: another start resumes it."""
    agent, worker = MadeUpProcess("node-0", "agent"), MadeUpProcess("node-0", "worker")
    place = {"rank": 0, "generation": 1}
    world = {"state": "active", "mode": "in-process"}
    agent.write(1.0, "world-formed", generation=1, nodes=["node-0"], size=1, cause="first", **world)
    worker.write(8.0, "world-joined", step=0, duration_s=0.0, **place)
    worker.window(9.0, 1.0, 1, 1, ended="first-step", **place)
    worker.window(19.0, 10.0, 11, 10, ended="due", **place)
    if leave:
        agent.write(19.5, "node-leaving", reason="SIGTERM")
    world["state"] = "paused"
    agent.write(19.6, "world-formed", generation=2, nodes=[], size=0, cause="paused", **world)
    worker.window(20.0, 1.0, 12, 1, ended="close", **place)
    agent.write(21.0, "journal-closed")
    for process in (agent, worker):
        (tmp_path / process.path).write_text("\n".join(process.lines) + "\n")
    report = report_of(merge(*read_folder(tmp_path)))
    assert report.have_left is leave
    assert ("All nodes left the job, stopped or preempted" in report.sentence) is leave
    assert ("still running" in report.sentence) is not leave
    assert ("There were no interruptions." in report.sentence) is leave


def test_a_job_that_its_nodes_left_because_the_script_failed_begins_with_the_error(
    tmp_path: Path,
) -> None:
    """As under torchrun, which by default starts no worker again."""
    agent = MadeUpProcess("node-0", "agent")
    world = {"mode": "restart", "generation": 1, "nodes": ["node-0"], "size": 1}
    agent.write(1.0, "world-formed", state="active", cause="first", **world)
    agent.write(2.0, "node-leaving", reason="its workers failed: ValueError: boom", failed=True)
    for generation, nodes in ((2, ["node-1"]), (3, [])):
        world |= {"generation": generation, "nodes": nodes, "size": len(nodes)}
        agent.write(2.0 + generation, "world-formed", state="paused", cause="paused", **world)
    (tmp_path / agent.path).write_text("\n".join(agent.lines) + "\n")
    sentence = report_of(merge(*read_folder(tmp_path))).sentence
    assert sentence.startswith("All nodes left the job after ")
    assert ": node-0: its workers failed: ValueError: boom." in sentence


def test_training_is_not_paused_while_one_node_restarts_its_worker(tmp_path: Path) -> None:
    """node-1's worker is killed; its replacement joins 30 s later, while node-0 trains."""
    agent = MadeUpProcess("node-0", "agent")
    survivor, killed, other_agent = (
        MadeUpProcess("node-0", "worker"),
        MadeUpProcess("node-1", "worker"),
        MadeUpProcess("node-1", "agent"),
    )
    worlds: list[tuple[float, str, list[str]]] = [
        (1.0, "first", ["node-0", "node-1"]),
        (20.5, "failure", ["node-0"]),
        (50.0, "joined", ["node-0", "node-1"]),
    ]
    for generation, (at_s, cause, nodes) in enumerate(worlds, 1):
        agent.write(
            at_s,
            "world-formed",
            generation=generation,
            nodes=nodes,
            size=len(nodes),
            state="active",
            mode="in-process",
            cause=cause,
            reason=cause,
        )
    begun_at_s, step = (10.0, 21.0, 51.0), 0
    for generation, (at_s, end_s) in enumerate(zip(begun_at_s, (20.0, 50.0, 60.0), strict=True), 1):
        for rank, worker in enumerate((survivor, killed)):
            if rank and generation == 2:
                continue
            place = {"rank": rank, "generation": generation}
            worker.write(at_s, "world-joined", step=step, duration_s=0.0, **place)
            worker.window(at_s + 0.1, 0.1, step + 1, 1, ended="first-step", **place)
            steps = round(end_s - at_s)
            worker.window(end_s, end_s - at_s - 0.1, step + 1 + steps, steps, ended="due", **place)
        step += 1 + round(end_s - at_s)
    other_agent.write(20.2, "worker-died", pid=7, local_rank=0, reason="was ended by SIGKILL")

    incidents = goodput_in(tmp_path, agent, survivor, killed, other_agent).incidents
    assert [incident.generations for incident in incidents] == [(2,), (3,)]
    assert [incident.cause for incident in incidents] == ["failure", "joined"]
    assert all(incident.pause_s <= 1.0 + 0.01 for incident in incidents)
    assert [incident.nodes for incident in incidents] == [("node-0", "node-1"), ("node-0",)]
