"""The signals that end agents, at every moment of a job's life: the newest committed step is on
disk when the agents have left, or the job says how many steps are lost; the next start goes on.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from etcd_fixtures import SmallEtcd, wait_alarm
from training_job import SCRIPTS, TrainingJob, Workload

import checkpoints
from elastic.store.embedded import EmbeddedEtcd
from elastic.store.etcd import EtcdStore
from elastic.testing.waiting import PATIENCE_S

SCRIPT = SCRIPTS / "leaving.py"
# The committed steps at each moment; None: the state of the last commit cannot be restored.
COMMITTED: dict[str, int | None] = {
    "import": 0,
    "join": 0,
    "data": 25,
    "forward": 25,
    "compile": 25,
    "callback": 25,
    "evaluation": 30,
    "evaluation on rank 0": 30,
    "evaluation of averaged weights": 30,
    "averaged weights without copies": None,
    "last step": 39,
    "last step without copies": None,
    "torch.compile": 25,
    "save in flight": 30,
    "recovery": 25,
    "joining": 30,
}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
CELLS = (
    (signal.SIGINT, "evaluation", 3),
    (signal.SIGHUP, "last step", 1),
)
# The same mechanisms, at more moments and on more nodes.
SLOW_CELLS = (
    (signal.SIGHUP, "data", 1),
    (signal.SIGQUIT, "last step", 1),
    (signal.SIGTERM, "join", 1),
    (signal.SIGUSR1, "compile", 1),
    (signal.SIGTERM, "evaluation of averaged weights", 1),
    (signal.SIGHUP, "forward", 1),
    (signal.SIGQUIT, "callback", 1),
    (signal.SIGTERM, "averaged weights without copies", 1),
    (signal.SIGTERM, "import", 3),
    (signal.SIGINT, "data", 1),
    (signal.SIGTERM, "evaluation", 1),
    (signal.SIGTERM, "evaluation on rank 0", 3),
    (signal.SIGINT, "last step", 1),
    *(
        (number, moment, nodes)
        for moment in ("torch.compile", "save in flight", "recovery", "joining")
        for number, nodes in (
            (signal.SIGTERM, 1),
            (signal.SIGTERM, 3),
            (signal.SIGINT, 1),
            (signal.SIGHUP, 3),
        )
    ),
)
REST = [
    (number, moment, nodes)
    for number in SIGNALS
    for moment in COMMITTED
    for nodes in (1, 3)
    if (number, moment, nodes) not in (*CELLS, *SLOW_CELLS)
]


def started(etcd: EmbeddedEtcd, folder: Path, moment: str, nodes: int) -> TrainingJob:
    """A job that is not entered yet. Its nodes form a world once all of them have arrived."""
    return TrainingJob(
        [etcd.endpoint],
        folder,
        script=SCRIPT,
        workload=Workload(extra=(f"--moment={moment}",)),
        min_nodes=nodes,
        max_nodes=nodes + (moment == "joining"),
        # In a recovery of one node, another worker has the state.
        nproc=2 if (moment, nodes) == ("recovery", 1) else 1,
        env={"PET_SIGNALS_TO_HANDLE": ",".join(number.name for number in SIGNALS)},
    )


def reach(job: TrainingJob, moment: str, nodes: int) -> None:
    for _ in range(nodes):
        job.start_node()
    of_rank_0 = moment.endswith("on rank 0") or moment == "recovery"
    places = [str(rank) for rank in range(1 if of_rank_0 else nodes)]
    places += ["save"] if moment == "save in flight" else []
    job.wait_for(lambda: have_reached(job, *places), PATIENCE_S, moment)
    if moment == "joining":
        job.start_node()
        job.wait_for(lambda: have_reached(job, "joining"), PATIENCE_S, moment)


def have_reached(job: TrainingJob, *places: str) -> bool:
    return all((job.folder / f"at-{place}").exists() for place in places)


def leave(job: TrainingJob, number: signal.Signals, *, repeats: int = 1) -> None:
    """Send the signal to all agents, and wait until they have left in order."""
    nodes = job.running
    for _ in range(repeats):
        for node in nodes:
            os.kill(node.pid, number)
    (job.folder / "release").touch()
    codes = {node.wait(PATIENCE_S) for node in nodes}
    assert codes == {130 if number is signal.SIGINT else 75}, job.report()


def newest_step(job: TrainingJob) -> int:
    found = checkpoints.list_checkpoints(job.folder / "checkpoints")
    return max((info.step for info in found), default=0)


def assert_saved_or_reported(job: TrainingJob, moment: str) -> None:
    committed = COMMITTED[moment]
    if committed is not None:
        assert newest_step(job) == committed, job.report()
        return
    assert newest_step(job) == 0, "never weights that the script has changed since"
    reasons = [event["reason"] for event in job.journaled("checkpoint-skipped")]
    assert any("steps since the checkpoint of step 0 are lost" in r for r in reasons), reasons


def assert_the_next_start_goes_on(job: TrainingJob, nodes: int) -> None:
    at = newest_step(job)
    before = len(job.ledger().starts)
    started_nodes = [job.start_node() for _ in range(nodes)]
    assert {node.wait(PATIENCE_S) for node in started_nodes} == {0}, job.report()
    resumed: Sequence[int] = [start.step for start in job.ledger().starts[before:]]
    assert set(resumed) == {at}


@pytest.mark.parametrize(("number", "moment", "nodes"), CELLS)
def test_nothing_is_lost_without_a_word(
    etcd: EmbeddedEtcd, tmp_path: Path, number: signal.Signals, moment: str, nodes: int
) -> None:
    check_cell(etcd, tmp_path, number, moment, nodes)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "moment", "nodes"), SLOW_CELLS)
def test_nothing_is_lost_in_more_cells(
    etcd: EmbeddedEtcd, tmp_path: Path, number: signal.Signals, moment: str, nodes: int
) -> None:
    check_cell(etcd, tmp_path, number, moment, nodes)


@pytest.mark.soak
@pytest.mark.parametrize(("number", "moment", "nodes"), REST)
def test_nothing_is_lost_in_any_other_cell(
    etcd: EmbeddedEtcd, tmp_path: Path, number: signal.Signals, moment: str, nodes: int
) -> None:
    check_cell(etcd, tmp_path, number, moment, nodes)


def check_cell(
    etcd: EmbeddedEtcd, folder: Path, number: signal.Signals, moment: str, nodes: int
) -> None:
    with started(etcd, folder, moment, nodes) as job:
        reach(job, moment, nodes)
        leave(job, number)
        assert_saved_or_reported(job, moment)
        assert_the_next_start_goes_on(job, nodes)


def test_further_signals_do_not_interrupt_the_last_save(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    with started(etcd, tmp_path, "evaluation", 1) as job:
        reach(job, "evaluation", 1)
        leave(job, signal.SIGTERM, repeats=3)
        assert newest_step(job) == 30


@pytest.mark.parametrize(
    ("nodes", "is_killed"),
    [
        (1, False),
        pytest.param(3, False, marks=pytest.mark.slow),
        pytest.param(3, True, marks=pytest.mark.slow),
    ],
)
def test_an_etcd_that_does_not_answer_does_not_prevent_the_last_save(
    tmp_path: Path, nodes: int, is_killed: bool
) -> None:
    with (
        EmbeddedEtcd(data_dir=tmp_path / "etcd") as etcd,
        started(etcd, tmp_path, "evaluation", nodes) as job,
    ):
        reach(job, "evaluation", nodes)
        (etcd.kill if is_killed else etcd.pause)()
        try:
            leave(job, signal.SIGTERM)
        finally:
            (etcd.start if is_killed else etcd.resume)()
        assert newest_step(job) == 30
        assert_the_next_start_goes_on(job, nodes)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["data", "evaluation", "joining"])
def test_a_full_etcd_does_not_prevent_the_last_save_of_three_nodes(
    tmp_path: Path, connect: Callable[..., EtcdStore], moment: str
) -> None:
    """No agent can write that it leaves, nor the leader a world without all of them."""
    with (
        SmallEtcd(data_dir=tmp_path / "etcd") as etcd,
        started(etcd, tmp_path, moment, 3) as job,
    ):
        reach(job, moment, 3)
        wait_alarm(connect(etcd.endpoint, connect_timeout_s=PATIENCE_S))
        leave(job, signal.SIGTERM)
        assert newest_step(job) == COMMITTED[moment]
