"""Unmodified sharded scripts in plain torch: they restart in the smaller world and resume."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from training_job import SCRIPTS

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.cluster import LocalCluster
from elastic.testing.forks.server import shared_fork_server
from elastic.testing.node import TorchrunOptions
from elastic.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

START = re.compile(r"start at step (\d+) over (\d+) ranks")


def starts(job: LocalCluster) -> list[tuple[int, int]]:
    """Step and size of each start, in order."""
    logs = "\n".join(node.log_text() for node in job.nodes)
    return sorted((int(step), int(size)) for step, size in START.findall(logs))


def newest_saved(folder: Path) -> int:
    complete = folder.glob("step-*/.metadata")
    return max((int(path.parent.name.removeprefix("step-")) for path in complete), default=0)


@pytest.mark.parametrize("script", ["fsdp2_plain.py", "tensor_parallel_plain.py"])
def test_a_sharded_script_resumes_after_deaths_of_a_rank_and_a_node(
    etcd: EmbeddedEtcd, tmp_path: Path, script: str
) -> None:
    saves = tmp_path / "saves"
    with LocalCluster(
        [etcd.endpoint],
        SCRIPTS / script,
        tmp_path / "job",
        TorchrunOptions(
            backend="etcd",
            max_nodes=2,
            nproc=2,
            conf={"failure_budget": 1000, "quarantine_s": 0.5},
        ),
        args=[f"--checkpoint-dir={saves}", "--step-s=0.1"],
        fork_server=shared_fork_server(),
    ) as job:

        def wait_start(size: int, at_least: int) -> None:
            def resumed() -> bool:
                return any(s == size and step >= at_least for step, s in starts(job))

            job.wait_for(resumed, 2 * PATIENCE_S, f"a start over {size} ranks from {at_least}")

        def wait_saved(after: int) -> int:
            job.wait_for(lambda: newest_saved(saves) > after, PATIENCE_S, "a checkpoint")
            return newest_saved(saves)

        first, last = job.start_nodes(2)
        wait_start(4, 0)
        saved = wait_saved(0)
        first.kill_worker(1)
        wait_start(4, saved)
        saved = wait_saved(newest_saved(saves))
        last.kill()
        wait_start(2, saved)
        wait_saved(newest_saved(saves))
