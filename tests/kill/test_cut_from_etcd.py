"""Some nodes lose etcd and nothing else: two worlds never make progress at once, and nothing is
lost.

Each node reaches etcd through its own proxy, which can be cut.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from etcd_proxy import CuttingProxy
from job_series import JobSeries, StartSeries
from training_job import SCRIPTS, TrainingJob, Workload, train_undisturbed

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.node import LocalNode
from elastic.testing.slowness import measure_slowness
from elastic.testing.waiting import PATIENCE_S

SCRIPT = SCRIPTS / "phases.py"
WORKLOAD = Workload(samples=250, epochs=20, step_s=0.6)
LEASE_S = 2.0
# On an idle machine. A member must stop after half of it; a cut that a job survives ends as soon as
# the leases have expired, in less than half of that half.
TAKEOVER_S = 24.0


class CutOffJob(TrainingJob):
    """Nodes that can each be cut from etcd."""

    def __init__(self, etcd: str, folder: Path, slowness: float) -> None:
        super().__init__(
            [etcd],
            folder,
            script=SCRIPT,
            workload=WORKLOAD,
            min_nodes=2,
            max_nodes=4,
            conf={
                "lease_s": LEASE_S,
                # A takeover must still happen within PATIENCE_S.
                "takeover_s": TAKEOVER_S * min(slowness, 4.0),
                "last_call_s": 1.0,
            },
        )
        self._etcd = etcd
        self._exits = ExitStack()
        self._proxies: dict[str, CuttingProxy] = {}

    def start_node(self, name: str | None = None, **settings: Any) -> LocalNode:
        proxy = self._exits.enter_context(CuttingProxy(self._etcd))
        node = super().start_node(name, endpoints=[proxy.endpoint], **settings)
        self._proxies[node.name] = proxy
        return node

    def cut(self, *nodes: LocalNode) -> None:
        for node in nodes:
            self._proxies[node.name].cut()

    def restore(self, *nodes: LocalNode) -> None:
        for node in nodes:
            self._proxies[node.name].restore()

    def wait_leases_ended(self, cut: list[LocalNode]) -> None:
        """Wait until etcd knows only the nodes that have not been cut from it."""
        others = {node.name for node in self.running} - {node.name for node in cut}
        self.wait_for(
            lambda: self.registered() == others, PATIENCE_S, f"{sorted(others)} alone in etcd"
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._exits:
            super().__exit__(kind, error, traceback)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("cut-off-alone"), WORKLOAD, SCRIPT)


@pytest.fixture(scope="module")
def jobs(etcd: EmbeddedEtcd, start_series: StartSeries, reference: Path) -> JobSeries[CutOffJob]:
    slowness = measure_slowness()
    return start_series(lambda folder: CutOffJob(etcd.endpoint, folder, slowness), reference)


@pytest.fixture
def job(jobs: JobSeries[CutOffJob]) -> CutOffJob:
    return jobs.current()


@pytest.mark.slow
def test_joining_nodes_wait_while_isolated_members_train(job: CutOffJob) -> None:
    """Two members lose etcd while two joining nodes reach it; then etcd is back for all.

    Then one of the four loses it permanently: it responds to probes and trains with the others
    until it must stop.
    """
    members = job.bring_to(2)
    generation = job.generation()
    job.cut(*members)
    candidates = [job.start_node() for _ in range(2)]
    # etcd is not restored before that: a step that waits for it would not end.
    job.wait_leases_ended(members)  # the joining nodes could take over
    job.wait_progress(3)
    assert job.training_nodes() == (generation, {node.name for node in members})
    assert job.generation() == generation
    job.restore(*members)
    job.wait_training(nodes=4, after_generation=generation)
    assert all(node.running for node in (*members, *candidates))

    generation = job.generation()
    leader = job.leader()
    lost = next(node for node in job.running if node is not leader)
    since_s = time.monotonic()
    job.cut(lost)
    job.wait_leases_ended([lost])
    job.wait_progress(2)
    newest = job.training_nodes()[0]
    assert newest == generation or job.journaled("node-suspected", since_s=since_s)
    # It must stop eventually. On a busy machine the others may evict it as too slow before that;
    # then it is no longer a member that must stop, but a node that waits for etcd.
    job.wait_for(
        lambda: not lost.running or job.training_nodes()[0] > generation,
        PATIENCE_S,
        f"the end of {lost.name}, or a world without it",
    )
    if lost.running:
        lost.kill()
    else:
        assert lost.wait(PATIENCE_S) not in (0, 75)
    job.wait_training(nodes=3, after_generation=generation)


@pytest.mark.slow
def test_members_that_stay_isolated_stop_before_they_are_replaced(job: CutOffJob) -> None:
    """After half of the takeover time, they save and stop; the joining nodes continue."""
    members = job.bring_to(2)
    generation = job.generation()
    job.cut(*members)
    candidates = [job.start_node() for _ in range(2)]
    for node in members:
        assert node.wait(PATIENCE_S) not in (0, 75)
        assert "no contact with etcd" in node.log_text()
    job.wait_training(nodes=2, after_generation=generation)
    assert job.training_nodes()[1] == {node.name for node in candidates}
    steps = job.ledger().steps
    last = max(s.step for s in steps if s.generation == generation)
    first = min(s.step for s in steps if s.generation > generation)
    assert first == last + 1, "steps were lost though their ranks could save"
