"""A node dies while its script saves the model, after the other node has finished."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.membership.records import Node, NodeState, decode
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.cluster import LocalCluster
from elastic.testing.forks.server import shared_fork_server
from elastic.testing.node import TorchrunOptions
from elastic.testing.waiting import PATIENCE_S

SCRIPT = """
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, weights = dist.get_rank(), torch.ones(3)
dist.all_reduce(weights)
dist.destroy_process_group()
if rank == 0:
    Path("saving").touch()
    while not Path("may-save").exists():
        time.sleep(0.02)
    torch.save(weights, "model.pt")
"""


@pytest.mark.slow
def test_the_other_node_runs_the_end_of_the_script_again(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = TorchrunOptions(min_nodes=2, max_nodes=2, max_restarts=0)
    with LocalCluster(
        [etcd.endpoint], script, tmp_path / "job", options, fork_server=shared_fork_server()
    ) as job:

        def states() -> list[NodeState]:
            entries = job.store.list(job.keys.nodes).entries
            return [decode(Node, entry.key, entry.value).state for entry in entries]

        nodes = job.start_nodes(2)
        job.wait_for((job.folder / "saving").exists, PATIENCE_S, "rank 0 saves")
        job.wait_for(lambda: NodeState.FINISHED in states(), PATIENCE_S, "the other has finished")
        dies = job.node_of_rank(0)
        (survivor,) = (node for node in nodes if node is not dies)
        dies.kill()
        (job.folder / "may-save").touch()
        assert survivor.wait(PATIENCE_S) == 0
        assert (job.folder / "model.pt").exists()
        world = job.world()
        assert world is not None and [m.name for m in world.members] == [survivor.name]
