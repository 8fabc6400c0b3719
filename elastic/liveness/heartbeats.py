"""Heartbeats of nodes, for users: `elastic status` shows the age of each, and its step.

Every agent's thread sends one to the leader over its liveness connection, and the leader's node
writes them with the job's progress (:mod:`elastic.leadership.progress_writer`): nodes make no
additional writes to etcd. No decision depends on them: a death is proved by connections and probes.
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
    """The thread of this agent runs, and this is the last report of its workers."""

    generation: _Count  # the newest in which they have begun a step; 0: none, or not known
    step: _Count | None  # committed; None: not known
    has_joined: bool | None = False  # a worker has called elastic.join(); None: unknown to agents

    def encode(self) -> bytes:
        """As a frame."""
        return strict_json.encode(dataclasses.asdict(self))

    def is_news(self, before: NodeHeartbeat | None) -> bool:
        """Whether it contains more than the progress of steps."""
        return before is None or replace(before, step=self.step) != self

    @staticmethod
    def decode(payload: bytes) -> NodeHeartbeat:
        """Parse strictly. Raises ProtocolError."""
        try:
            return typed_json.convert(NodeHeartbeat, strict_json.decode(payload))
        except typed_json.DecodeError as error:
            raise ProtocolError(f"the heartbeat {error}") from None


@dataclass(frozen=True)
class HeardHeartbeat:
    """The last one of a node, and when it was received by this agent's monotonic clock."""

    heartbeat: NodeHeartbeat
    at_s: float


class Heartbeats:
    """This node's, and while it leads those of the others. One per agent; without locks, by copies:
    the node's thread sends, that of the connections receives, a third one reads."""

    def __init__(self, node_id: str, clock: Clock) -> None:
        self._node_id = node_id
        self._clock = clock
        self._heard: dict[str, HeardHeartbeat] = {}
        self._next_s = -math.inf
        self._sent: NodeHeartbeat | None = None

    def send_if_due(self, heartbeat: NodeHeartbeat, send: Callable[[bytes], object]) -> None:
        """Called whenever the node's thread runs; changes are sent at once. A leader sends none,
        and receives its own."""
        now = self._clock.monotonic()
        if now < self._next_s and not heartbeat.is_news(self._sent):
            return
        self._next_s, self._sent = now + HEARTBEAT_S, heartbeat
        self.heard(self._node_id, heartbeat)
        send(heartbeat.encode())

    def heard(self, node_id: str, heartbeat: NodeHeartbeat) -> None:
        """A node has sent one. Those of nodes that were lost long ago are dropped."""
        now = self._clock.monotonic()
        self._heard[node_id] = HeardHeartbeat(heartbeat, now)
        for known, last in self._heard.copy().items():
            if now - last.at_s > RECENT_LOSS_S:
                self._heard.pop(known, None)

    def by_node(self) -> Mapping[str, HeardHeartbeat]:
        """The last one of each node. A node that does not lead only has its own."""
        return self._heard.copy()
