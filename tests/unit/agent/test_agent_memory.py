"""The agent's checkpoint memory: its owner, its lifetime and its neighbours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kit.membership_nodes import node as node_of

from elastic.agent.identity import current_process
from elastic.agent.memory import AgentMemory, host_memory, neighbours, sweep
from elastic.errors import ConfigError
from elastic.membership.records import Node, WorldRecord
from elastic.tuning.options import AgentOptions
from elastic.wire.handshake import SecretKey
from elastic.wire.messages import Cause, MemoryLocation, WorldState


def host(folder: Path, **options: float) -> AgentMemory:
    def fail(error: BaseException) -> None:
        raise error

    return host_memory(
        mine(),
        AgentOptions(**options),  # type: ignore[arg-type]
        lambda: None,
        key=SecretKey.generate,
        on_error=fail,
        parent=folder,
    )


def mine() -> Node:
    return replace(node_of("n1"), node_id="ab", process=current_process())


def world(*nodes: Node) -> WorldRecord:
    return WorldRecord(
        generation=1,
        members=tuple(node.as_member() for node in nodes),
        store_host="h",
        store_port=1,
        nonce="aa",
        mode="restart",
        switch_at_step=None,
        state=WorldState.ACTIVE,
        min_nodes=1,
        max_nodes=4,
        lineage=(),
        cause=Cause.FIRST,
        reason="",
        time_s=0.0,
    )


def test_the_memory_lives_as_long_as_its_agent(tmp_path: Path) -> None:
    memory = host(tmp_path)
    (folder,) = tmp_path.iterdir()
    assert memory.folder == str(folder)
    published = memory.published(mine())
    assert published.memory_port > 0
    sweep(current_process(), tmp_path)  # another agent that starts here
    assert folder.exists()
    memory.close()
    memory.close()
    assert list(tmp_path.iterdir()) == []
    assert memory.folder == ""


def test_the_next_agent_removes_the_memory_of_a_killed_agent(tmp_path: Path) -> None:
    me = current_process()
    names = {
        "gone": f"elastic-memory-{me.pid_namespace}-{me.pid}-{me.start_ticks + 1}-ab",
        "elsewhere": f"elastic-memory-{me.pid_namespace + 1}-{me.pid}-1-ab",
        "ours": f"elastic-memory-{me.pid_namespace}-{me.pid}-{me.start_ticks}-cd",
        "not one": "elastic-memory-notes",
    }
    for name in names.values():
        (tmp_path / name / "own").mkdir(parents=True)
    host(tmp_path).close()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {names["elsewhere"], names["ours"], names["not one"]}


def test_no_memory_is_created_if_disabled_or_impossible(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for memory in (host(tmp_path, node_memory_share=0), host(tmp_path / "missing")):
        assert memory.published(mine()) == mine()
        assert memory.folder == ""
        memory.refresh()
        memory.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"node_memory_share=0\.9"):
        AgentOptions(node_memory_share=0.9)
    with pytest.raises(ConfigError, match=r"parts and copies would take 100% of memory"):
        AgentOptions(node_memory_copies=3)
    with pytest.raises(ConfigError, match=r"at least one copy"):
        AgentOptions(node_memory_copies=0)


def test_the_successor_is_the_next_in_rank_order_that_has_a_memory() -> None:
    a, b, c = (
        replace(node_of(name), memory_port=port) for name, port in (("n1", 1), ("n2", 2), ("n3", 3))
    )
    assert [p.port for p in neighbours(world(a, b, c), b.node_id).peers] == [3, 1]
    last = neighbours(world(a, b, c), c.node_id)
    assert last.successor is not None and last.successor.port == 1
    assert [p.port for p in neighbours(world(a, b, c), a.node_id).further] == [3]
    without = replace(a, memory_port=0)
    next_one = neighbours(world(without, b, c), c.node_id).successor
    assert next_one is not None and next_one.port == 2
    for alone in (world(a), world(b, c), None):
        assert neighbours(alone, a.node_id).successor is None


def test_nodes_outside_of_the_world_follow_its_members() -> None:
    """A node that restarts its workers is not in the next world, and may hold the newest parts."""
    a, b = (replace(node_of(name), memory_port=port) for name, port in (("n1", 1), ("n2", 2)))
    outside = (MemoryLocation(node_id="id-n3", name="n3", host="10.0.0.3", port=3),)
    of_a = neighbours(replace(world(a, b), outside=outside), a.node_id)
    assert [p.port for p in of_a.peers] == [2, 3]
    assert of_a.successor == of_a.peers[0]
    assert of_a.peers[1].identity == "id-n3"
    alone = neighbours(replace(world(a), outside=outside), a.node_id)
    assert alone.successor is not None and alone.successor.port == 3
