"""An agent's responses to ``/livez`` and ``/readyz``. Pure: facts in, a verdict out.

*Live* means that the agent's own threads make progress. Nothing else matters: killing an agent does
not repair a job that is paused, waits for nodes or has lost etcd, but harms it.

*Ready* means that this node's workers are in the current world, which may be paused.
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
    """The response for a path of the health server."""

    @property
    def status(self) -> HTTPStatus:
        """The HTTP status."""
        ...

    @property
    def content_type(self) -> str:
        """The Content-Type header."""
        ...

    def body(self) -> bytes:
        """The body of the response."""
        ...


@dataclass(frozen=True)
class HealthStatus:
    """The result of a probe, and the reason. ``details`` are added to the body."""

    is_ok: bool
    reason: str
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def status(self) -> HTTPStatus:
        """200 or 503: kubelets evaluate only this."""
        return HTTPStatus.OK if self.is_ok else HTTPStatus.SERVICE_UNAVAILABLE

    @property
    def content_type(self) -> str:
        """The Content-Type header."""
        return "application/json"

    def body(self) -> bytes:
        """One line of JSON."""
        return (
            json.dumps({"ok": self.is_ok, "reason": self.reason, **self.details}).encode() + b"\n"
        )


Routes = Mapping[str, Callable[[], Answer]]


def routes_of(status: NodeStatus, hung_after_s: float) -> Routes:
    """The paths and their responses. They take no lock: a hung thread that holds one must not
    block the response that reports it."""
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
    """Whether every thread has made progress within ``hung_after_s``."""
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
    """Whether this node's workers are in the current world."""
    is_ready, reason = _is_in_world(node, world, done)
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


def _is_in_world(node: Node, world: WorldRecord | None, done: Done | None) -> tuple[bool, str]:
    if done is not None:
        return False, f"the job has ended: {done.outcome.value}: {done.reason}"
    if (reason := _NOT_IN_A_WORLD.get(node.state)) is not None:
        return False, reason
    if node.running is None:
        return False, _without_world(node)
    if world is None:  # the store was wiped: the running world is valid
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
