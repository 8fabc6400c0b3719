"""An unmodified script with its own checkpoints, which does or does not resume."""

from __future__ import annotations

from pathlib import Path

from training_job import SCRIPTS

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.cluster import LocalCluster
from elastic.testing.forks.server import shared_fork_server
from elastic.testing.node import TorchrunOptions
from elastic.testing.waiting import PATIENCE_S

SCRIPT = SCRIPTS / "own_checkpoints.py"


def saved(folder: Path) -> list[int]:
    path = folder / "saved"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


TOLD = "training has started over: the restarted script has written"


def test_only_a_script_that_starts_over_is_warned(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    """One that starts over, and one that resumes: two jobs that wait concurrently."""
    first, second, elsewhere = (tmp_path / name for name in ("first", "second", "elsewhere"))
    arguments = [f"--out_dir={elsewhere}", "--init_from=resume"]
    one_node = TorchrunOptions(max_nodes=1)
    with (
        LocalCluster(
            [etcd.endpoint], SCRIPT, first, one_node, fork_server=shared_fork_server()
        ) as job,
        LocalCluster(
            [etcd.endpoint],
            SCRIPT,
            second,
            one_node,
            args=arguments,
            fork_server=shared_fork_server(),
        ) as other,
    ):
        fresh, resuming = job.start_node(), other.start_node()
        job.wait_for(lambda: len(saved(first / "out")) > 2, PATIENCE_S, "checkpoints")
        other.wait_for(lambda: len(saved(elsewhere)) > 2, PATIENCE_S, "checkpoints")
        fresh.kill_worker()
        (elsewhere / "hold").touch()  # a kill during a write would leave a partial file
        other.wait_for((elsewhere / "held").exists, PATIENCE_S, "a script that does not write")
        before = saved(elsewhere)
        resuming.kill_worker()
        (elsewhere / "hold").unlink()
        job.wait_for(lambda: TOLD in fresh.log_text(), PATIENCE_S, "the warning")
        assert f"{first.resolve()}/out/ckpt.pt again without having read it" in fresh.log_text()
        # The script reads its checkpoint, so its next save shows whether it has resumed.
        other.wait_for(lambda: len(saved(elsewhere)) > len(before) + 3, PATIENCE_S, "more")
        numbers = saved(elsewhere)
        assert numbers == sorted(numbers), "it has resumed"
        assert TOLD not in resuming.log_text()
