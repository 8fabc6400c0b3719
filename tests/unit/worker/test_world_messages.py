"""What is derived from a world: each fact has one source, and arrives everywhere."""

from __future__ import annotations

from dataclasses import fields, replace
from unittest.mock import patch

import pytest

from elastic.groups.world import world_from_environment
from elastic.link.link import WorldMessage, decode, encode
from elastic.membership.records import WorldRecord
from elastic.wire.handshake import SecretKey
from elastic.wire.messages import (
    CALL_JOIN,
    NO_WORLD,
    Cause,
    RankAssignment,
    WorldIdentity,
    WorldSpec,
    WorldState,
    derive,
    identity_in,
    identity_variable,
    number_on_node,
    world_variables,
)
from elastic.wire.tls import TlsFiles
from elastic.worker.worlds import group_spec, world_of, write_environment

KEY = SecretKey(bytes(range(32)))
MESSAGE = WorldMessage(
    world=WorldSpec(
        generation=7,
        nonce="3f9c",
        lineage=(1, 2, 5),
        store_host="10.0.0.1",
        store_port=4711,
        switch_at_step=30,
        state=WorldState.PAUSED,
        cause=Cause.LOST,
        reason="n3 is lost",
        committed_step=29,
    ),
    assignment=RankAssignment(rank=3, size=4, local_rank=1, local_size=2),
    node_rank=1,
    nodes=2,
    store_key=KEY.text,
    store_tls=TlsFiles("/ca", "/cert", "/key"),
)


@pytest.mark.parametrize("message", [MESSAGE, replace(MESSAGE, assignment=None, store_tls=None)])
def test_a_nested_message_is_decoded_to_its_types(message: WorldMessage) -> None:
    received = decode(encode(message))
    assert received == message
    assert isinstance(received, WorldMessage)
    assert received.world.cause is Cause.LOST and received.world.state is WorldState.PAUSED


def test_the_environment_and_the_message_describe_the_same_world() -> None:
    """A new worker reads the same world that an existing one receives over the link."""
    started = {"ELASTIC_NODE_NAME": "n1", "LOCAL_RANK": "1"}
    with patch.dict("os.environ", started, clear=True) as env:
        write_environment(MESSAGE)
        assert world_from_environment(env) == world_of(MESSAGE)
        torchruns = {name for name in env if not name.startswith("ELASTIC_")}
    assert torchruns == {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        *("GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    }


def test_a_virtual_local_rank_stays_that_of_the_script() -> None:
    """torchrun --virtual-local-rank: every worker sees one GPU, at index 0."""
    started = {"LOCAL_RANK": "0", "TORCHELASTIC_ERROR_FILE": "/tmp/attempt_0/1/error.json"}
    with patch.dict("os.environ", started, clear=True) as env:
        write_environment(MESSAGE)
        assert env["LOCAL_RANK"] == "0"
        assert number_on_node(env) == 1 == world_of(MESSAGE).local_rank


def test_each_variable_has_the_value_of_its_field() -> None:
    assert MESSAGE.assignment is not None
    variables = world_variables(
        MESSAGE.world,
        MESSAGE.assignment,
        node_rank=MESSAGE.node_rank,
        nodes=MESSAGE.nodes,
        store_host=MESSAGE.world.store_host,
        store_port=MESSAGE.world.store_port,
    )
    assert variables == {
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


def test_a_worker_without_a_world_reads_generation_0() -> None:
    alone = RankAssignment(rank=0, size=1, local_rank=0, local_size=1)
    variables = world_variables(
        NO_WORLD, alone, node_rank=0, nodes=1, store_host="localhost", store_port=CALL_JOIN
    )
    world = world_from_environment(variables)
    assert (world.generation, world.nonce, world.lineage, world.size) == (0, "", (), 1)


def test_the_group_spec_matches_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_PEER_SILENCE_S", "4.5")
    spec = group_spec(MESSAGE)
    expected = {**vars(MESSAGE.world), **vars(MESSAGE.assignment)}
    for field in fields(spec):
        if field.name not in ("store_key", "store_tls", "silence_s"):
            assert getattr(spec, field.name) == expected[field.name], field.name
    assert spec.silence_s == 4.5
    assert spec.store_key == KEY and spec.store_tls == TlsFiles("/ca", "/cert", "/key")
    assert group_spec(replace(MESSAGE, store_tls=None)).store_tls is None


def test_a_worker_receives_the_shared_part_of_the_world_record() -> None:
    record = derive(
        WorldRecord,
        MESSAGE.world,
        members=(),
        mode="in-process",
        min_nodes=1,
        max_nodes=2,
        time_s=0.0,
    )
    assert derive(WorldSpec, record) == MESSAGE.world
    assert identity_in(identity_variable(record)) == WorldIdentity(
        generation=7, nonce="3f9c", lineage=(1, 2, 5)
    )


def test_a_missing_required_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="nonce"):
        derive(WorldIdentity, generation=1, lineage=())
