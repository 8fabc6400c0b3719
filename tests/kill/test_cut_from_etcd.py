"""Some nodes lose etcd and nothing else: never two worlds in progress, and nothing is lost.

Each node reaches etcd through a proxy of its own, which can be cut.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from etcd_proxy import CuttingProxy
from training_job import SCRIPTS, TrainingJob, Workload, train_undisturbed

from elastic.store.embedded.etcd import EmbeddedEtcd
from elastic.testing.node import LocalNode
from elastic.testing.slowness import measure_slowness
from elastic.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "phases.py"
WORKLOAD = Workload(samples=500, epochs=20, step_s=0.3)
LEASE_S = 2.0
# All three on an idle machine. A cut lasts for CUT_S, with time enough to find etcd again before
# half of the takeover time is over: then a member has to stop.
TAKEOVER_S = 20.0
STEP_WITHIN_S = 10.0
CUT_S = 3 * LEASE_S


class CutOff:
    """A job whose nodes can each be cut from etcd."""

    def __init__(
        self, etcd: EmbeddedEtcd, job: TrainingJob, proxies: ExitStack, slowness: float
    ) -> None:
        self.job = job
        self.step_within_s = STEP_WITHIN_S * slowness
        self._etcd = etcd
        self._exits = proxies
        self._proxies: dict[str, CuttingProxy] = {}

    def start_node(self) -> LocalNode:
        proxy = self._exits.enter_context(CuttingProxy(self._etcd.endpoint))
        node = self.job.start_node(endpoints=[proxy.endpoint])
        self._proxies[node.name] = proxy
        return node

    def cut(self, *nodes: LocalNode) -> None:
        for node in nodes:
            self._proxies[node.name].cut()

    def restore(self, *nodes: LocalNode) -> None:
        for node in nodes:
            self._proxies[node.name].restore()


@pytest.fixture
def cluster(etcd: EmbeddedEtcd, tmp_path: Path) -> Iterator[CutOff]:
    slowness = measure_slowness()
    with (
        ExitStack() as proxies,
        TrainingJob(
            [etcd.endpoint],
            tmp_path,
            script=SCRIPT,
            workload=WORKLOAD,
            min_nodes=2,
            max_nodes=4,
            conf={
                "lease_s": LEASE_S,
                # A takeover has to come within PATIENCE_S all the same.
                "takeover_s": TAKEOVER_S * min(slowness, 4.0),
                "last_call_s": 1.0,
            },
        ) as job,
    ):
        yield CutOff(etcd, job, proxies, slowness)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("cut-off-alone"), WORKLOAD, SCRIPT)


def test_joining_nodes_wait_while_the_members_train(cluster: CutOff, reference: Path) -> None:
    """Two members lose etcd, two joining nodes arrive who reach it; then etcd is back for all.

    And then one of the four loses it for good: it answers, and trains with the others, until it
    has to stop.
    """
    job = cluster.job
    members = [cluster.start_node() for _ in range(2)]
    generation = job.wait_training(nodes=2)
    cluster.cut(*members)
    cut_s = time.monotonic()
    candidates = [cluster.start_node() for _ in range(2)]
    # Until their leases are long gone, and the joining nodes are there to take over.
    while time.monotonic() - cut_s < CUT_S:
        job.wait_progress(1, timeout_s=cluster.step_within_s)
    assert job.training_nodes() == (generation, {node.name for node in members})
    assert job.generation() == generation
    cluster.restore(*members)
    job.wait_training(nodes=4, after_generation=generation)
    assert all(node.running for node in (*members, *candidates))

    generation = job.generation()
    lost = next(node for node in job.running if node is not job.leader())
    cluster.cut(lost)
    cut_s = time.monotonic()
    while time.monotonic() - cut_s < 2 * LEASE_S:
        job.wait_progress(1, timeout_s=cluster.step_within_s)
    assert job.training_nodes()[0] == generation
    assert lost.wait(PATIENCE_S) not in (0, 75)
    job.wait_training(nodes=3, after_generation=generation)
    job.assert_finishes_whole(reference)


def test_members_that_stay_cut_off_stop_before_they_are_replaced(
    cluster: CutOff, reference: Path
) -> None:
    """Half of the takeover time without etcd: they save and stop; the joining nodes go on."""
    job = cluster.job
    members = [cluster.start_node() for _ in range(2)]
    generation = job.wait_training(nodes=2)
    cluster.cut(*members)
    candidates = [cluster.start_node() for _ in range(2)]
    for node in members:
        assert node.wait(PATIENCE_S) not in (0, 75)
        assert "no contact with etcd" in node.log_text()
    job.wait_training(nodes=2, after_generation=generation)
    new, names = job.training_nodes()
    assert names == {node.name for node in candidates}
    steps = job.ledger().steps
    last = max(s.step for s in steps if s.generation == generation)
    first = min(s.step for s in steps if s.generation == new)
    assert first == last + 1, "steps were lost though their ranks could save"
    job.assert_finishes_whole(reference)
