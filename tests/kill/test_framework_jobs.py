"""Jobs of each framework on real agents: workers and nodes are killed, join, and start again.

What such a job computes is compared with the plain framework in tests/integrations.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.cluster import LocalCluster
from elastic.testing.forks.server import shared_fork_server
from elastic.testing.node import TorchrunOptions, worker_pids
from elastic.testing.waiting import PATIENCE_S

SCRIPTS = Path(__file__).parents[1] / "integrations" / "scripts"
STEPS, EPOCHS = 12, 3  # of an epoch; epochs
FRAMEWORKS = {
    "lightning": "lightning_job.py",
    "transformers": "trainer_job.py",
    "accelerate": "loop_job.py",
    "fabric": "loop_job.py",
}


class Job(LocalCluster):
    """A job of a framework whose places wait for a file, so that a fault meets them."""

    def __init__(
        self, etcd: EmbeddedEtcd, folder: Path, framework: str, *, nodes: int, **options: Any
    ) -> None:
        package = framework.replace("fabric", "lightning")
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs torch-elastic-harness[{package}]")
        super().__init__(
            [etcd.endpoint],
            SCRIPTS / FRAMEWORKS[framework],
            folder,
            TorchrunOptions(min_nodes=1, max_nodes=nodes, conf={"last_call_s": 1.0}),
            args=[json.dumps({"folder": str(folder), "framework": framework, **options})],
            fork_server=shared_fork_server(),
        )
        self.framework = framework

    def wait_at(self, place: str) -> None:
        """Until rank 0 is at a place, where it waits."""
        self.wait_for(
            lambda: (self.folder / f"at-{place}").exists() or None, PATIENCE_S, f"at {place}"
        )

    def go_on(self) -> None:
        (self.folder / "go").touch()

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(p.read_text()) for p in sorted(self.folder.glob("result-*.json"))]

    def assert_complete(self, *, at_most: int) -> None:
        results = self.results()
        assert 1 <= len(results) <= at_most  # a process that starts may come too late
        assert {r["global_step"] for r in results} == {STEPS * EPOCHS}
        assert len({r["weights"] for r in results}) == 1
        assert all(r["validations"] == [STEPS, 2 * STEPS, 3 * STEPS] for r in results)
        if self.framework == "transformers":
            expected = {f"checkpoint-{STEPS * (e + 1)}" for e in range(EPOCHS)}
        else:
            expected = {f"epoch={e}-step={STEPS * (e + 1)}.ckpt" for e in range(EPOCHS)}
        saved = {p.name for p in (self.folder / "saved").iterdir() if not p.name.startswith(".")}
        assert saved == expected


@pytest.mark.slow
def test_survivors_continue_in_lightning(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    with Job(etcd, tmp_path / "job", "lightning", nodes=2, place="train") as job:
        job.start_nodes(2)
        job.wait_at("train")
        pids = worker_pids(job.running)
        first = job.node_of_rank(0)
        first.kill()  # with its agent
        job.go_on()
        (survivor,) = job.running
        assert worker_pids([survivor])[survivor.name] == pids[survivor.name]
        assert job.wait_ended()[survivor.name] == 0
        job.assert_complete(at_most=1)


# What happens, and where rank 0 is at that moment.
FAULTS = {
    "a worker": ("worker", "train"),
    "rank 0's node": ("rank 0's node", "train"),
    "a join": ("join", "train"),
    "rank 0's node in an evaluation": ("rank 0's node", "validation"),
    "rank 0's node in a save": ("rank 0's node", "save"),
    "all nodes": ("all nodes", "train"),
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_faults(
    etcd: EmbeddedEtcd, tmp_path: Path, framework: str, fault: str, accumulate: int, workers: int
) -> None:
    what, place = FAULTS[fault]
    started = {"rank 0's node": 3, "all nodes": 6}.get(what, 4)  # processes
    options = {"place": place, "accumulate": accumulate, "workers": workers, "all": started}
    with Job(etcd, tmp_path / "job", framework, nodes=3, **options) as job:
        job.start_nodes(3)
        job.wait_at(place)
        if what == "worker":
            job.running[-1].kill_worker()
        elif what == "rank 0's node":
            job.node_of_rank(0).kill()
        elif what == "join":
            job.node_of_rank(0).kill()
            job.start_node()
        else:
            for node in job.running:
                node.kill()
            job.start_nodes(3)
        job.go_on()
        job.wait_ended()
        job.assert_complete(at_most=3)
