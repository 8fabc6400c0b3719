"""What an agent answers to ``/livez`` and ``/readyz``. Pure: the facts come in, a verdict goes out.

*Live* means that the agent's own threads turn. Nothing else counts: a job that is paused, waits
for nodes or has lost etcd is not healed by killing an agent, it is harmed.

*Ready* means that this node's workers are in the present world. A paused world is a world.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

from elastic.membership.records import Done, Node, NodeState, WorldRecord, WorldState
from elastic.node.status import NodeStatus


class Answer(Protocol):
    """What a path of the health server answers."""

    @property
    def status(self) -> HTTPStatus:
        """Of the response."""
        ...

    @property
    def content_type(self) -> str:
        """The header."""
        ...

    def body(self) -> bytes:
        """What follows the headers."""
        ...


@dataclass(frozen=True)
class HealthStatus:
    """An answer, and why. ``details`` go into the body beside them."""

    is_ok: bool
    reason: str
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def status(self) -> HTTPStatus:
        """What probes go by."""
        return HTTPStatus.OK if self.is_ok else HTTPStatus.SERVICE_UNAVAILABLE

    @property
    def content_type(self) -> str:
        """Of the body."""
        return "application/json"

    def body(self) -> bytes:
        """One line of JSON."""
        return (
            json.dumps({"ok": self.is_ok, "reason": self.reason, **self.details}).encode() + b"\n"
        )


Routes = Mapping[str, Callable[[], Answer]]


def routes_of(status: NodeStatus, hung_after_s: float) -> Routes:
    """The paths and their answers. They take no lock: one that a hung thread holds must not
    hang the answer that it is."""
    return {
        "/livez": lambda: liveness(status.watchdog.silences_s(), hung_after_s),
        "/readyz": lambda: readiness(
            status.node,
            status.world.world,
            status.done,
            is_parked=status.parked,
            waits_for=status.waits_for,
        ),
    }


def liveness(silences_s: Mapping[str, float], hung_after_s: float) -> HealthStatus:
    """Whether every thread has turned within ``hung_after_s``."""
    for thread, silent_s in silences_s.items():
        if silent_s > hung_after_s:
            return HealthStatus(
                False,
                f"{thread} has made no progress for {silent_s:.1f} s "
                f"(hung_after_s={hung_after_s:g})",
            )
    return HealthStatus(True, "the agent's threads make progress")


def readiness(
    node: Node,
    world: WorldRecord | None,
    done: Done | None,
    *,
    is_parked: bool,
    waits_for: str = "",
) -> HealthStatus:
    """Whether this node's workers are in the present world."""
    is_ready, reason = _standing(node, world, done)
    if waits_for and not is_ready:
        reason = f"{node.name} waits: {waits_for}; {reason}"
    details: dict[str, object] = {"node": node.name, "parked": is_parked}
    if world is not None:
        details["world"] = {
            "generation": world.generation,
            "state": world.state.value,
            "nodes": len(world.members),
            "size": world.size,
        }
    if done is not None:
        details["job"] = {
            "outcome": done.outcome.value,
            "exit_code": done.exit_code,
            "reason": done.reason,
        }
    return HealthStatus(is_ready, reason, details)


def _standing(node: Node, world: WorldRecord | None, done: Done | None) -> tuple[bool, str]:
    if done is not None:
        return False, f"the job has ended: {done.outcome.value}: {done.reason}"
    if (said := _NOT_IN_A_WORLD.get(node.state)) is not None:
        return False, said
    if node.running is None:
        return False, _without_world(node)
    if world is None:  # the store was emptied: what runs stands
        return True, f"in generation {node.running.generation}"
    if node.node_id not in world.node_ids:
        return False, f"generation {world.generation} continues without this node: {world.reason}"
    behind = node.running.generation < world.generation
    if behind and world.switch_at_step is None:
        return False, f"the workers change to generation {world.generation}: {world.reason}"
    if world.state is WorldState.PAUSED:
        return True, f"in generation {world.generation}, which is paused: {world.reason}"
    return True, f"in generation {node.running.generation}"


_NOT_IN_A_WORLD = {
    NodeState.LEAVING: "this node was asked to leave",
    NodeState.FAILED: "this node's workers have failed",
    NodeState.FINISHED: "this node's workers have succeeded; it waits for those of the other nodes",
}


def _without_world(node: Node) -> str:
    failed = f"; its workers failed before: {node.failure}" if node.failure else ""
    if node.state is NodeState.READY:
        return "the workers are ready, and wait for a world that includes them"
    if node.state is NodeState.STARTING:
        return "the workers are warming up"
    return f"waiting for a world{failed}"
