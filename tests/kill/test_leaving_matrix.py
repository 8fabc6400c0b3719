"""The signals that end agents, at every moment of a job's life: the newest committed step is on
disk when the agents have left, or the job says how many steps are lost; the next start goes on.

The cells of one number of nodes share a job, since starting one takes longer than any moment: each
cell resumes what the one before it has left, and proves that this was the newest committed step.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from etcd_fixtures import SmallEtcd, wait_alarm
from training_job import SCRIPTS, TrainingJob, Workload

import checkpoints
from elastic.store.embedded import EmbeddedEtcd
from elastic.store.etcd import EtcdStore
from elastic.testing.waiting import PATIENCE_S

STEPS = 10  # of an epoch
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
# Of each moment of scripts/leaving.py one.
CELLS = (
    (signal.SIGTERM, "import", 1),
    (signal.SIGHUP, "join", 1),
    (signal.SIGQUIT, "warm-up", 1),
    (signal.SIGUSR1, "data", 1),
    (signal.SIGINT, "forward", 1),
    (signal.SIGHUP, "compile", 1),
    (signal.SIGTERM, "save in flight", 1),
    (signal.SIGINT, "second signal", 1),
    (signal.SIGTERM, "averaged weights without copies", 1),
    (signal.SIGQUIT, "between epochs", 1),
    (signal.SIGHUP, "last step", 1),
    (signal.SIGINT, "evaluation", 3),
    (signal.SIGTERM, "recovery", 1),
)
MOMENTS = (
    *(moment for _, moment, _ in CELLS),
    "callback",
    "evaluation on rank 0",
    "evaluation of averaged weights",
    "last step without copies",
)
# Each moment on one node and on three, with one of the signals.
SLOW_CELLS = [
    (number, moment, nodes)
    for number, (nodes, moment) in zip(
        itertools.cycle(SIGNALS), itertools.product((1, 3), MOMENTS), strict=False
    )
    if (number, moment, nodes) not in CELLS
]
REST = [
    (number, moment, nodes)
    for nodes, number, moment in itertools.product((1, 3), SIGNALS, MOMENTS)
    if (number, moment, nodes) not in (*CELLS, *SLOW_CELLS)
]


class Leaving:
    """A job of so many nodes, which all leave at a moment of :mod:`leaving`."""

    def __init__(self, etcd: EmbeddedEtcd, folder: Path, nodes: int) -> None:
        self.nodes = nodes
        self.job = TrainingJob(
            [etcd.endpoint],
            folder,
            script=SCRIPTS / "leaving.py",
            workload=Workload(samples=12 * STEPS, batch=12, epochs=1000),
            min_nodes=nodes,
            env={"PET_SIGNALS_TO_HANDLE": ",".join(number.name for number in SIGNALS)},
        )

    @property
    def newest_step(self) -> int:
        """Of the checkpoints on disk."""
        found = checkpoints.list_checkpoints(self.job.folder / "checkpoints")
        return max((info.step for info in found), default=0)

    def start(self, moment: str, *, more_steps: int | None = None) -> None:
        """Start the nodes; the job ends after ``more_steps``, or the rest of their last epoch."""
        for left in (*self.job.folder.glob("at-*"), self.job.folder / "release"):
            left.unlink(missing_ok=True)
        epochs = 1000 if more_steps is None else -(-(self.newest_step + more_steps) // STEPS)
        self.moment, self.resumed_at = moment, self.newest_step
        self._last_generation = self.job.ledger().last_generation
        self.job.env |= {"MOMENT": moment, "EPOCHS": str(epochs)}
        # In a recovery of one node, another worker has the state.
        nproc = 2 if (moment, self.nodes) == ("recovery", 1) else 1
        # Where nothing can be saved, the nodes leave at the end of their grace period.
        conf = {"termination_grace_s": 20} if moment.endswith("without copies") else {}
        for _ in range(self.nodes):
            self.job.start_node(nproc=nproc, max_nodes=self._max_nodes, conf=conf)

    @property
    def _max_nodes(self) -> int:
        return self.nodes + (self.moment == "warm-up")

    def reach(self, moment: str) -> None:
        """Start the nodes, and wait until all have reached the moment."""
        self.start(moment, more_steps=STEPS if moment.startswith("last step") else None)
        of_rank_0 = moment.endswith("on rank 0") or moment == "recovery"
        self._wait_at(*map(str, range(1 if of_rank_0 else self.nodes)))
        if moment == "save in flight":
            self._wait_at("save")
        if moment == "warm-up":
            self.job.start_node(max_nodes=self._max_nodes)
            self._wait_at("joining")

    def _wait_at(self, *places: str) -> None:
        files = [self.job.folder / f"at-{place}" for place in places]
        self.job.wait_for(lambda: all(f.exists() for f in files), PATIENCE_S, self.moment)

    def leave(self, number: signal.Signals) -> None:
        """Send the signal to all agents, and wait until they have left in order."""
        agents = self.job.running
        for agent in agents:
            os.kill(agent.pid, number)
        if self.moment == "second signal":
            self._wait_at("save")
            for agent in agents * 2:
                os.kill(agent.pid, number)
        (self.job.folder / "release").touch()
        codes = {agent.wait(PATIENCE_S) for agent in agents}
        assert codes == {130 if number is signal.SIGINT else 75}, self.job.report()

    def assert_nothing_is_lost_without_a_word(self) -> None:
        job, resumed_at = self.job, self.resumed_at
        starts = [s for s in job.ledger().starts if s.generation > self._last_generation]
        first = min((start.generation for start in starts), default=0)
        assert {s.step for s in starts if s.generation == first} <= {resumed_at}, job.report()
        if self.moment.endswith("without copies"):
            assert self.newest_step == resumed_at, "never weights that the script has changed since"
            reasons = [event["reason"] for event in job.journaled("checkpoint-skipped")]
            lost = f"steps since the checkpoint of step {resumed_at} are lost"
            assert any(lost in reason for reason in reasons), reasons
            return
        place = "death" if self.moment == "recovery" else "0"
        committed = int((job.folder / f"at-{place}").read_text())
        assert self.newest_step == max(committed, resumed_at), job.report()

    def train_to_the_end(self) -> None:
        """From the newest checkpoint, with each sample once per epoch."""
        self.start("", more_steps=1)
        nodes = self.job.nodes[-self.nodes :]
        assert {node.wait(PATIENCE_S) for node in nodes} == {0}, self.job.report()
        epochs = int(self.job.env["EPOCHS"])
        assert self.newest_step == epochs * STEPS, "a clean end leaves the last step"
        self.job.ledger().assert_exactly_once(12 * STEPS, epochs)


class LeavingJobs:
    """Jobs whose nodes have left, by their number of nodes."""

    def __init__(self, start: Callable[[int], Leaving]) -> None:
        self._start = start
        self._left: dict[int, Leaving] = {}

    @contextmanager
    def of(self, nodes: int) -> Iterator[Leaving]:
        """A job without a running node, for others unless this block fails."""
        leaving = self._left.pop(nodes, None) or self._start(nodes)
        with ExitStack() as stack:
            stack.push(leaving.job)
            yield leaving
            stack.pop_all()
        self._left[nodes] = leaving

    def stop(self) -> None:
        for leaving in self._left.values():
            leaving.job.stop()


@pytest.fixture(scope="module")
def jobs(etcd: EmbeddedEtcd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LeavingJobs]:
    made = LeavingJobs(lambda nodes: Leaving(etcd, tmp_path_factory.mktemp("job"), nodes))
    yield made
    made.stop()


@pytest.mark.parametrize(
    ("number", "moment", "nodes"),
    [
        *CELLS,
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in SLOW_CELLS),
        *(pytest.param(*cell, marks=pytest.mark.soak) for cell in REST),
    ],
)
def test_nothing_is_lost_without_a_word(
    jobs: LeavingJobs, number: signal.Signals, moment: str, nodes: int
) -> None:
    with jobs.of(nodes) as leaving:
        leaving.reach(moment)
        leaving.leave(number)
        leaving.assert_nothing_is_lost_without_a_word()


@pytest.mark.parametrize("nodes", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_each_sample_is_trained_once_although_the_nodes_left_at_every_moment(
    jobs: LeavingJobs, nodes: int
) -> None:
    with jobs.of(nodes) as leaving:
        leaving.train_to_the_end()


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
    with EmbeddedEtcd(data_dir=tmp_path / "etcd") as etcd:
        leaving = Leaving(etcd, tmp_path, nodes)
        with leaving.job:
            leaving.reach("evaluation")
            (etcd.kill if is_killed else etcd.pause)()
            try:
                leaving.leave(signal.SIGTERM)
            finally:
                (etcd.start if is_killed else etcd.resume)()
            leaving.assert_nothing_is_lost_without_a_word()
            leaving.train_to_the_end()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["data", "evaluation", "warm-up"])
def test_a_full_etcd_does_not_prevent_the_last_save_of_three_nodes(
    tmp_path: Path, connect: Callable[..., EtcdStore], moment: str
) -> None:
    """No agent can write that it leaves, nor the leader a world without all of them."""
    with SmallEtcd(data_dir=tmp_path / "etcd") as etcd:
        leaving = Leaving(etcd, tmp_path, 3)
        with leaving.job:
            leaving.reach(moment)
            wait_alarm(connect(etcd.endpoint, connect_timeout_s=PATIENCE_S))
            leaving.leave(signal.SIGTERM)
            leaving.assert_nothing_is_lost_without_a_word()
