"""A script that knows nothing of this project, saves by itself, and does or does not resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_job import SCRIPTS

from elastic.store.embedded.etcd import EmbeddedEtcd
from elastic.testing.cluster import LocalCluster
from elastic.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.cluster

SCRIPT = SCRIPTS / "own_checkpoints.py"


def saved(folder: Path) -> list[int]:
    path = folder / "saved"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def test_only_the_script_that_starts_over_is_told(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    first, second, elsewhere = (tmp_path / name for name in ("first", "second", "elsewhere"))
    with LocalCluster([etcd.endpoint], SCRIPT, first, max_nodes=1) as job:
        fresh = job.start_node()
        job.wait_for(lambda: len(saved(first / "out")) > 2, PATIENCE_S, "checkpoints")
        fresh.kill_worker()
        told = "training has started over: the restarted script has written"
        job.wait_for(lambda: told in fresh.log_text(), PATIENCE_S, "the warning")
        assert f"{first.resolve()}/out/ckpt.pt again without having read it" in fresh.log_text()
    arguments = [f"--out_dir={elsewhere}", "--init_from=resume"]
    with LocalCluster([etcd.endpoint], SCRIPT, second, max_nodes=1, args=arguments) as job:
        resuming = job.start_node()
        job.wait_for(lambda: len(saved(elsewhere)) > 2, PATIENCE_S, "checkpoints")
        resuming.kill_worker()
        before = saved(elsewhere)
        # The script reads, so by its next save it is clear that it has resumed.
        job.wait_for(lambda: len(saved(elsewhere)) > len(before) + 20, PATIENCE_S, "more")
        numbers = saved(elsewhere)
        assert numbers == sorted(numbers), "it has resumed"
        assert told not in resuming.log_text()
