"""Replicas of two nodes under real torchrun: complete ones train, and spares report why they wait.

The script is the tensor-parallel example with one worker per node: a layer is sharded over two
nodes, so the script would fail in a world with an odd number of nodes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from training_job import SCRIPTS, TrainingJob, Workload, train_undisturbed

from elastic.cli import describe, status
from elastic.cli.status import document
from elastic.cli.view import JobView, read_job, sentence
from elastic.errors import SYSTEM_CLOCK, ConfigError, NodeRefused
from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.node import LocalNode
from elastic.testing.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "tensor_parallel.py"
WAITS = "waits: 1 of 2 nodes of a replica"
ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


def seen(job: TrainingJob) -> JobView:
    return read_job(job.store, job.keys, SYSTEM_CLOCK.wall())


def spare_of(job: TrainingJob) -> LocalNode:
    """The one running node outside the world, once it has reported the reason."""

    def waiting() -> LocalNode | None:
        world = job.world()
        inside = {m.name for m in world.members} if world is not None else set()
        outside = [node for node in job.running if node.name not in inside]
        is_told = len(outside) == 1 and f"{outside[0].name} {WAITS}" in outside[0].log_text()
        return outside[0] if is_told else None

    return job.wait_for(waiting, PATIENCE_S, "one node that says that it waits")


def assert_in_plain_sight(job: TrainingJob, spare: LocalNode) -> None:
    def shown() -> JobView | None:
        view = seen(job)
        return view if f"{spare.name} {WAITS}" in sentence(view) else None

    view = job.wait_for(shown, PATIENCE_S, "its reason in `elastic status`")
    (node,) = (n for n in view.joining if n.name == spare.name)
    assert f"waits:         {WAITS.removeprefix('waits: ')}" in list(
        describe.describe(view, "node", spare.name)
    )
    nodes = {n["name"]: n["waits"] for n in document(view)["nodes"]}
    assert nodes.pop(spare.name) == WAITS.removeprefix("waits: ")
    assert not any(nodes.values()), nodes
    assert status.ranks_of(view, node) == "-"


def test_a_tensor_parallel_job_continues_in_complete_replicas(
    etcd: EmbeddedEtcd, tmp_path: Path
) -> None:
    of = Workload(
        samples=192,
        batch=24,
        epochs=6,
        step_s=1.0,
        save_every=4,
        extra=(f"--example={EXAMPLE}", "--sequences=192", "--layers=1"),
    )
    script = SCRIPTS / "paced_example.py"
    (tmp_path / "undisturbed").mkdir()
    undisturbed = train_undisturbed(tmp_path / "undisturbed", of, script, ALONE)
    with TrainingJob(
        [etcd.endpoint],
        tmp_path / "job",
        script=script,
        workload=of,
        min_nodes=1,
        max_nodes=5,
        conf={"replica_size": 2},
    ) as job:
        job.start_nodes(5)
        generation = job.wait_training(nodes=4)
        world = job.world()
        assert world is not None and (world.min_nodes, world.max_nodes) == (2, 4)
        spare = spare_of(job)
        assert_in_plain_sight(job, spare)

        odd = job.start_node("odd", nproc=3)
        other = job.start_node("other", conf={"replica_size": 1})
        assert odd.wait(PATIENCE_S) == ConfigError.exit_code
        assert "replica_size=2 is incompatible with 3 workers on this node" in odd.log_text()
        assert other.wait(PATIENCE_S) == NodeRefused.exit_code
        said = "other was started with replica_size=1, the job runs with replica_size=2"
        assert said in other.log_text()

        # Of the last replica, so that the peer of a killed node stays, with the spare.
        victim, partner = (job.node(m.name) for m in world.members[-2:])
        victim.kill()
        generation = job.wait_training(nodes=4, after_generation=generation)
        world = job.world()
        assert world is not None
        names = [m.name for m in world.members]
        assert names[-2:] == [spare.name, partner.name], names

        spare.kill()
        generation = job.wait_training(nodes=2, after_generation=generation)
        assert spare_of(job) is partner
        assert_in_plain_sight(job, partner)
        job.assert_finishes_whole(undisturbed)
