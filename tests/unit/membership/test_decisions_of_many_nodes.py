"""The effort of a decision grows with the number of nodes, not with its square."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType

import pytest
from kit.membership_nodes import NOW, dead, node, seen, suspect, view, world

from elastic.membership.decision import decide, waiting_nodes
from elastic.membership.records import FailureReport, NodeState, WorldRecord
from elastic.membership.view import MissingMember, NodeView, Policy, View

SIZES = (60, 120)
# Twice as many nodes: 2 if the effort is linear, 4 if it is quadratic.
MOST = 3.0


class CountedText(str):
    """An id or a name that counts comparisons, which no profiler sees."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountedText.comparisons += 1
        return str.__eq__(self, str(other))

    __hash__ = str.__hash__


def effort(function: Callable[..., object], *arguments: object) -> int:
    """The number of calls and comparisons."""
    CountedText.comparisons, calls = 0, 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return calls + CountedText.comparisons


def numbered(number: int, state: NodeState, **fields: object) -> NodeView:
    node_id, name = CountedText(f"id-n{number}"), CountedText(f"host{number}")
    n = replace(node(f"n{number}", state), node_id=node_id, name=name, max_nodes=500)
    return seen(replace(n, **fields))  # type: ignore[arg-type]


def situations(size: int, mode: str, replica_size: int) -> Iterator[tuple[str, View]]:
    in_process = mode == "in-process"
    state = NodeState.READY if in_process else NodeState.STARTING
    group = world(limits=(2, 500), mode=mode, replica_size=replica_size)
    own = {"in_process": in_process, "replica_size": replica_size}
    nodes = [numbered(i, state, **own) for i in range(size)]
    group = replace(group, members=tuple(n.node.as_member() for n in nodes))
    nodes = [replace(n, node=replace(n.node, running=group)) for n in nodes]
    half, other = nodes[::2], nodes[1::2]
    spare = NodeState.READY if in_process else NodeState.ARRIVED
    spares = [numbered(size + i, spare, **own) for i in range(size)]
    reports = tuple(
        FailureReport(node_id=n.node.node_id, generation=7, error="reset", unreachable=("id-n0",))
        for n in nodes
    )
    yield "all train", view(group, *nodes)
    yield "half are dead", view(group, *half, *map(dead, other))
    yield "half are silent", view(group, *half, *map(suspect, other))
    for state in (NodeState.FINISHED, NodeState.LEAVING):
        ending = (replace(n, node=replace(n.node, state=state)) for n in other)
        yield f"half are {state.value}", view(group, *half, *ending)
    gone = [
        MissingMember(member=n.node.as_member(), proved_dead=False, last_sign_s=NOW - 999)
        for n in other
    ]
    yield "half have no key", view(group, *half, gone=gone)
    yield "all report", replace(view(group, *nodes, failure_reports=reports), failing_since_s=0.0)
    yield "as many wait", view(group, *nodes, *spares)
    full = replace(group, max_nodes=size)
    waiting = [replace(n, node=replace(n.node, max_nodes=size)) for n in spares]
    yield "as many wait for a full world", view(full, *nodes, *waiting)
    names = {n.node.name: NOW + 99 for n in (*nodes, *spares)}
    yield "all are quarantined", view(group, *nodes, *spares, quarantined=names)
    yield "broken replicas, and others wait", view(group, *half, *map(dead, other), *spares)
    yield "a world without members", view(empty(group), *nodes, *spares)
    yield "the first world", view(None, *spares)


def empty(group: WorldRecord) -> WorldRecord:
    return replace(group, generation=8, members=(), leaving=group.members)


@pytest.mark.parametrize("replica_size", [1, 2])
@pytest.mark.parametrize("mode", ["restart", "in-process"])
def test_twice_as_many_nodes_take_twice_the_effort(mode: str, replica_size: int) -> None:
    efforts: dict[str, list[int]] = {}
    for size in SIZES:
        policy = Policy(min_nodes=2, max_nodes=500)
        for name, of in situations(size, mode, replica_size):
            # (A view is used for both, as by the leader.)
            for function in (decide, waiting_nodes):
                what = f"{function.__name__}: {name}"
                efforts.setdefault(what, []).append(effort(function, of, NOW, policy))
    for what, (few, many) in efforts.items():
        assert many <= MOST * max(few, SIZES[0]), f"{what}: {few} and {many}"
