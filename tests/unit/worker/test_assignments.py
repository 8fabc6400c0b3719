"""What a worker makes of the world that its agent has assigned to it."""

from __future__ import annotations

from dataclasses import asdict
from unittest.mock import patch

from kit.assignments import assignment

from elastic.groups.world import ReplicaMesh, world_from_environment
from elastic.wire.messages import CALL_JOIN, NO_WORLD, number_on_node, world_variables
from elastic.worker.worlds import world_of, write_environment

SECOND_NODE = assignment(
    7,
    nonce="3f9c",
    lineage=(1, 2, 5),
    rank=3,
    size=4,
    local_rank=1,
    local_size=2,
    node_rank=1,
    nodes=2,
    store_host="10.0.0.1",
    store_port=4711,
)
NO_MESH = ReplicaMesh()


def test_the_world_has_what_was_assigned() -> None:
    mesh = ReplicaMesh.parse({"shard": 2})
    with patch.dict("os.environ", {"ELASTIC_NODE_NAME": "n1"}, clear=True):
        world = world_of(SECOND_NODE, mesh)
    given = asdict(SECOND_NODE)
    common = ("generation", "nonce", "lineage", "rank", "size", "local_rank", "local_size")
    assert {name: getattr(world, name) for name in common} == {n: given[n] for n in common}
    assert (world.node, world.is_launched, world.mesh) == ("n1", True, mesh)


def test_a_new_worker_reads_the_same_world_from_its_environment() -> None:
    started = {"ELASTIC_NODE_NAME": "n1", "LOCAL_RANK": "1"}
    with patch.dict("os.environ", started, clear=True) as env:
        write_environment(SECOND_NODE)
        assert world_from_environment(env) == world_of(SECOND_NODE, NO_MESH)
        written = {name: value for name, value in env.items() if name not in started}
    assert written == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4711",
        "ELASTIC_WORLD": '{"generation":7,"nonce":"3f9c","lineage":[1,2,5]}',
    }


def test_a_virtual_local_rank_stays_that_of_the_script() -> None:
    """torchrun --virtual-local-rank: every worker sees one GPU, at index 0."""
    started = {"LOCAL_RANK": "0", "TORCHELASTIC_ERROR_FILE": "/tmp/attempt_0/1/error.json"}
    with patch.dict("os.environ", started, clear=True) as env:
        write_environment(SECOND_NODE)
        assert env["LOCAL_RANK"] == "0"
        assert number_on_node(env) == 1 == world_of(SECOND_NODE, NO_MESH).local_rank


def test_a_worker_without_a_world_reads_generation_0() -> None:
    variables = world_variables(
        NO_WORLD,
        rank=0,
        size=1,
        local_size=1,
        node_rank=0,
        nodes=1,
        store_host="localhost",
        store_port=CALL_JOIN,
    )
    world = world_from_environment(variables)
    assert (world.generation, world.nonce, world.lineage, world.size) == (0, "", (), 1)
