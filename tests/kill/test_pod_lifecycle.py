"""A job's life on Kubernetes, with real processes: drained, killed, scaled, suspended, finished.

See stateful_set.py for the emulation of the cluster. The tests share one job; each test scales it
to the pods that it needs, and may run alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fake_api_server import NAMESPACE, FakeApiServer
from job_series import JobSeries, StartSeries
from stateful_set import NAME, Probe, StatefulSet
from training_job import FINAL, SCRIPTS, SESSION, Workload, assert_same_weights, train_undisturbed

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.slowness import is_within
from elastic.testing.waiting import PATIENCE_S
from elastic.wire.messages import WorldState

# Few and slow steps: the job must outlast ten minutes of changes on a busy machine, and ends in
# seconds after ``hurry``.
WORKLOAD = Workload(samples=500, epochs=7, step_s=0.8, save_every=20)
PREEMPTED = 75
# A drain takes a step or two, and the agent's exit: 2 s. The grace period is 60 s, none of which
# may be spent waiting in vain.
LEAVES_WITHIN_S = 30.0


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("pods-alone"), WORKLOAD, SESSION)


@pytest.fixture(scope="module")
def jobs(etcd: EmbeddedEtcd, start_series: StartSeries) -> JobSeries[StatefulSet]:
    settings = {"PET_NNODES": "2:5", "ELASTIC_LAST_CALL_S": "1.5"}
    return start_series(
        lambda folder: StatefulSet(
            [etcd.endpoint], folder, script=SESSION, workload=WORKLOAD, settings=settings
        )
    )


@pytest.fixture
def workers(jobs: JobSeries[StatefulSet]) -> StatefulSet:
    return jobs.current()


def names(count: int) -> list[str]:
    return [f"{NAME}-{ordinal}" for ordinal in range(count)]


def trained_by(workers: StatefulSet, count: int, after_generation: int) -> None:
    workers.wait_training(nodes=count, after_generation=after_generation)
    workers.wait_ready(*names(count))


def bring_to(workers: StatefulSet, count: int) -> None:
    """Scale until exactly this number of pods train, whatever the previous test left."""
    generation = workers.training_nodes()[0]
    is_changed = workers.pods != tuple(names(count))
    workers.scale(count)
    workers.wait_pods(*names(count))
    trained_by(workers, count, generation if is_changed else 0)


def test_three_pods_train_and_are_ready(workers: StatefulSet) -> None:
    bring_to(workers, 3)
    for name in names(3):
        answer = workers.probe(name, "/readyz")
        assert answer.body["node"] == name
        assert answer.body["world"]["nodes"] == 3
        assert workers.probe(name, "/livez").status == 200


def test_a_drained_pod_leaves_between_two_steps_and_rejoins(workers: StatefulSet) -> None:
    bring_to(workers, 3)
    step = workers.ledger().last_step
    # The leader plans the boundary by the rate of steps; without one it waits for a second only.
    workers.wait_for(lambda: workers.ledger().last_step >= step + 3, PATIENCE_S, "three steps")
    generation, before = workers.training_nodes()[0], len(workers.ended)
    drained = workers.pod(f"{NAME}-1")
    workers.delete(f"{NAME}-1")
    drained.terminate()  # a second SIGTERM, as `docker stop` on top of a drain: it changes nothing
    end = workers.wait_ended_pods(before + 1)[before]
    assert (end.name, end.exit_code, end.left) == (f"{NAME}-1", PREEMPTED, ())
    assert is_within(end.took_s, LEAVES_WITHIN_S)
    assert "world-fault" not in journal(workers, generation)
    trained_by(workers, 3, generation)


def test_all_pods_train_after_a_scale_up(workers: StatefulSet) -> None:
    bring_to(workers, 3)
    generation = workers.training_nodes()[0]
    workers.scale(5)
    workers.wait_training(nodes=5, after_generation=generation)


def test_killed_and_hung_pods_are_replaced_under_the_same_name(workers: StatefulSet) -> None:
    bring_to(workers, 5)
    generation, before = workers.training_nodes()[0], len(workers.ended)
    workers.pod(f"{NAME}-3").pause()
    assert workers.probe(f"{NAME}-3", "/livez").status == 0  # a kubelet would restart it, too
    workers.delete(f"{NAME}-3", grace_s=1.0)
    workers.pod(f"{NAME}-0").kill()
    ends = workers.wait_ended_pods(before + 2)[before:]
    assert {(end.name, end.exit_code) for end in ends} == {(f"{NAME}-0", -9), (f"{NAME}-3", -9)}
    trained_by(workers, 5, generation)


def test_removed_pods_leave_gracefully_on_a_scale_down(workers: StatefulSet) -> None:
    bring_to(workers, 5)
    generation, before = workers.training_nodes()[0], len(workers.ended)
    workers.scale(2)
    ends = workers.wait_ended_pods(before + 3)[before:]
    assert sorted(end.name for end in ends) == names(5)[2:]
    assert {(end.exit_code, end.left) for end in ends} == {(PREEMPTED, ())}
    assert is_within(max(end.took_s for end in ends), LEAVES_WITHIN_S)
    trained_by(workers, 2, generation)


def test_below_min_nodes_a_pod_stays_live_and_exits_on_sigterm(workers: StatefulSet) -> None:
    """Scaled to 1, then to 0: suspended. Nothing is lost, and the job resumes after a scale-up."""
    bring_to(workers, 2)
    before = len(workers.ended)
    workers.scale(1)

    def is_ready_in_a_paused_world() -> bool:
        answer = workers.probe(f"{NAME}-0", "/readyz")
        state = answer.body.get("world", {}).get("state")
        return (answer.status, state) == (200, WorldState.PAUSED.value)

    workers.wait_for(is_ready_in_a_paused_world, PATIENCE_S, "a paused world")
    assert workers.probe(f"{NAME}-0", "/livez").status == 200
    workers.scale(0)
    ends = workers.wait_ended_pods(before + 2)[before:]
    assert {(end.exit_code, end.left) for end in ends} == {(PREEMPTED, ())}
    assert is_within(max(end.took_s for end in ends), LEAVES_WITHIN_S)
    step, generation = workers.ledger().last_step, workers.ledger().last_generation
    workers.scale(2)
    trained_by(workers, 2, generation)
    assert min(s.step for s in workers.ledger().starts if s.generation > generation) == step + 1


def test_a_pod_deleted_during_warm_up_ends_immediately(workers: StatefulSet) -> None:
    bring_to(workers, 2)
    generation, before = workers.training_nodes()[0], len(workers.ended)
    hold = workers.folder / "hold-start"
    hold.touch()
    try:
        workers.scale(3)
        workers.wait_for(
            lambda: f"{NAME}-2" in workers.pods and workers.pod(f"{NAME}-2").workers(),
            PATIENCE_S,
            "a worker",
        )
        assert workers.probe(f"{NAME}-2", "/readyz").status == 503
        workers.scale(2)
        end = workers.wait_ended_pods(before + 1)[before]
    finally:
        hold.unlink()
    assert (end.name, end.exit_code, end.left) == (f"{NAME}-2", PREEMPTED, ())
    assert is_within(end.took_s, LEAVES_WITHIN_S)
    workers.wait_progress(3)
    assert workers.training_nodes()[0] == generation  # the others are unaffected


@pytest.mark.slow
def test_the_finished_job_parks_its_pods_and_the_finisher_ends_them(
    workers: StatefulSet, reference: Path, tmp_path: Path
) -> None:
    """Including later pods. A pod of a finished job waits, because it would be restarted if it
    exited.
    """
    bring_to(workers, 2)
    before = len(workers.ended)
    workers.hurry()
    assert parked(workers, *names(2)) == ["success", "success"]
    ledger = workers.ledger()
    ledger.assert_exactly_once(WORKLOAD.samples, WORKLOAD.epochs)
    ledger.assert_one_world_at_a_time()
    ledger.final_hash()
    assert_same_weights(workers.folder / FINAL, reference)
    workers.delete(f"{NAME}-1")
    end = workers.wait_ended_pods(before + 1)[before]
    assert (end.exit_code, end.left) == (0, ())
    assert parked(workers, f"{NAME}-1") == ["success"]
    assert workers.pod(f"{NAME}-1").workers() == {}
    assert workers.ledger().starts == ledger.starts  # it has not restarted training

    before = len(workers.ended)
    with FakeApiServer(tmp_path, scales={(NAMESPACE, NAME): 2}) as api:
        api.on_scale = lambda _, replicas: workers.scale(replicas)
        with finisher(workers, api) as late:
            assert late.wait(timeout=PATIENCE_S) == 0
    workers.wait_pods()
    ends = workers.ended[before:]
    assert {(end.exit_code, end.left) for end in ends} == {(0, ())}
    workers.assert_nothing_left()


@pytest.mark.slow
def test_a_failed_job_is_not_restarted(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    """Its pods park as usual, the finisher reports the failure, and nothing restarts."""
    folder, credentials = tmp_path / "job", tmp_path / "api"
    credentials.mkdir()
    with (
        StatefulSet(
            [etcd.endpoint], folder, script=SCRIPTS / "hopeless.py", settings={"PET_NNODES": "1:2"}
        ) as workers,
        FakeApiServer(credentials, scales={(NAMESPACE, NAME): 1}) as api,
    ):
        workers.scale(1)
        api.on_scale = lambda _, replicas: workers.scale(replicas)
        with finisher(workers, api, "--keep-failed") as waiting:
            assert parked(workers, f"{NAME}-0") == ["failure"]
            assert waiting.wait(timeout=PATIENCE_S) == 1
        assert workers.pods == (f"{NAME}-0",)
        assert workers.ended == []
        with finisher(workers, api) as late:
            assert late.wait(timeout=PATIENCE_S) == 1
        workers.wait_pods()
        (end,) = workers.ended
        assert (end.exit_code, end.left) == (1, ())


def test_a_step_longer_than_the_grace_period_does_not_kill_the_pod(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    """Its workers are stopped within the step, in time for the agent to exit gracefully (its peers
    are notified)."""
    settings = {
        "PET_NNODES": "1:2",
        "ELASTIC_LAST_CALL_S": "0.3",
        "ELASTIC_TERMINATION_GRACE_S": "15",
    }
    with StatefulSet(
        [etcd.endpoint],
        tmp_path,
        script=SESSION,
        workload=replace(WORKLOAD, step_s=600.0),
        settings=settings,
    ) as workers:
        workers.scale(1)
        workers.wait_for(lambda: workers.ledger().begins, PATIENCE_S, "a step")
        workers.wait_running("workers-0")
        workers.scale(0)
        (end,) = workers.wait_ended_pods(1)
        # -9 if it was the kubelet's SIGKILL.
        assert (end.exit_code, end.left) == (PREEMPTED, ())
        assert "so they are killed" not in workers.nodes[0].log_text()


@contextmanager
def finisher(
    workers: StatefulSet, api: FakeApiServer, *flags: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The finisher's pod."""
    environment = {
        **os.environ,
        **api.environ,
        "PET_RDZV_ENDPOINT": workers.endpoints[0],
        "PET_RDZV_ID": workers.run_id,
    }
    # Where a kubelet would mount the service account.
    mounted = (
        "import sys, pathlib; from elastic.cli import finish; from elastic.cli.main import main; "
        "finish.CREDENTIALS = pathlib.Path(sys.argv[1]); sys.exit(main(sys.argv[2:]))"
    )
    command = [
        *(sys.executable, "-c", mounted, str(api.credentials)),
        *("finish", f"--statefulset={NAME}", *flags),
    ]
    with subprocess.Popen(command, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def parked(workers: StatefulSet, *pods: str) -> list[str]:
    """Wait until these are parked: live, not ready. Returns the outcome reported by each."""

    def answers() -> list[Probe]:
        found = [workers.probe(name, "/readyz") for name in pods]
        return found if all(a.body.get("parked") for a in found) else []

    found = workers.wait_for(answers, PATIENCE_S, f"{pods} parked")
    assert {answer.status for answer in found} == {503}
    assert {workers.probe(name, "/livez").status for name in pods} == {200}
    return [answer.body["job"]["outcome"] for answer in found]


def journal(workers: StatefulSet, generation: int) -> set[str]:
    """Names of the workers' events in that generation."""
    found = set()
    for file in (workers.folder / "journal").glob("*.jsonl"):
        for line in file.read_text().splitlines(keepends=True):
            event = json.loads(line) if line.endswith("\n") else {}
            if event.get("generation") == generation:
                found.add(str(event["event"]))
    return found
