"""Heartbeats of nodes, for users: `elastic status` shows each one's age and step.

Every agent sends heartbeats to the leader over its liveness connection, and the leader writes them
to etcd with the job's progress (:mod:`elastic.leadership.progress_writer`), so nodes need no writes
of their own. No decision depends on heartbeats: connections and probes prove a death.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from elastic.clock import Clock
from elastic.messages import typed_json
from elastic.secure_channel import strict_json
from elastic.secure_channel.errors import ProtocolError
from elastic.tuning.agent_intervals import HEARTBEAT_S, RECENT_LOSS_S

_Count = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class NodeHeartbeat:
    """The agent's thread runs; the fields are the latest report from its workers."""

    generation: _Count  # the newest in which a worker has begun a step; 0: none, or unknown
    step: _Count | None  # committed; None: unknown
    has_joined: bool | None = False  # a worker called elastic.join(); None: unknown to the agent

    def encode(self) -> bytes:
        """Encode as a frame's payload."""
        return strict_json.encode(dataclasses.asdict(self))

    def has_changed_since(self, before: NodeHeartbeat | None) -> bool:
        """Whether anything but the step has changed."""
        return before is None or replace(before, step=self.step) != self

    @staticmethod
    def decode(payload: bytes) -> NodeHeartbeat:
        """Parse strictly. Raises ProtocolError."""
        try:
            return typed_json.convert(NodeHeartbeat, strict_json.decode(payload))
        except typed_json.DecodeError as error:
            raise ProtocolError(f"the heartbeat {error}") from None


@dataclass(frozen=True)
class ReceivedHeartbeat:
    """A node's latest heartbeat, and the time of its receipt by this agent's monotonic clock."""

    heartbeat: NodeHeartbeat
    at_s: float


class Heartbeats:
    """This node's latest heartbeat and, while it leads, those of all nodes. One per agent.

    Copies make locks unnecessary: the node's thread sends, the connections' thread receives, and a
    third one reads.
    """

    def __init__(self, node_id: str, clock: Clock) -> None:
        self._node_id = node_id
        self._clock = clock
        self._latest: dict[str, ReceivedHeartbeat] = {}
        self._next_s = self._prune_s = -math.inf
        self._sent: NodeHeartbeat | None = None

    def send_if_due(self, heartbeat: NodeHeartbeat, send: Callable[[bytes], object]) -> None:
        """Send at most every HEARTBEAT_S, and changes at once. A leader's own heartbeat is only
        recorded."""
        now = self._clock.monotonic()
        if now < self._next_s and not heartbeat.has_changed_since(self._sent):
            return
        self._next_s, self._sent = now + HEARTBEAT_S, heartbeat
        self.record(self._node_id, heartbeat)
        send(heartbeat.encode())

    def record(self, node_id: str, heartbeat: NodeHeartbeat) -> None:
        """Record a node's heartbeat, and drop those of nodes that were lost long ago."""
        now = self._clock.monotonic()
        self._latest[node_id] = ReceivedHeartbeat(heartbeat, now)
        if now < self._prune_s:  # not at each one: there are as many heartbeats as nodes
            return
        self._prune_s = now + RECENT_LOSS_S / 10
        for known, last in self._latest.copy().items():
            if now - last.at_s > RECENT_LOSS_S:
                self._latest.pop(known, None)

    def by_node(self) -> Mapping[str, ReceivedHeartbeat]:
        """The latest heartbeat of each node. A follower has only its own."""
        return self._latest.copy()
