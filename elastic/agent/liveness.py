"""Detects within milliseconds which agents are alive, by connections between a job's nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import socket
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from elastic.errors import SYSTEM_CLOCK, Clock
from elastic.membership.view import Liveness
from elastic.telemetry.log import get_logger
from elastic.tuning.intervals import (
    RECENT_LOSS_S,
)
from elastic.wire import base, typed_json
from elastic.wire.base import Limits, ProtocolError
from elastic.wire.channel import Channel
from elastic.wire.handshake import Credentials, SecretKey
from elastic.wire.hub import Connection, Handler, Hub, listen
from elastic.wire.tls import Tls

# Each node sends a heartbeat to the leader over their connection this often, without any write to
# etcd.
HEARTBEAT_S = 2.0
# To connect to a peer that may be suspected: longer than a handshake on a busy machine, shorter
# than a lease.
LIVENESS_CONNECT_S = 1.0
# After a connection to a peer was reset: its agent may be restarting.
PROBE_AGAIN_S = 0.05

# ----------------------------------------------------------------------------
# Heartbeats of nodes, for users: `elastic status` shows each one's age and step.
#
# Every agent sends heartbeats to the leader over its liveness connection, and the leader writes
# them to etcd with the job's progress (:mod:`elastic.agent.progress`), so nodes need
# no writes of their own. No decision depends on heartbeats: connections and probes prove a death.

_Count = Annotated[int, Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class NodeHeartbeat:
    """The agent's thread runs; the fields are the latest report from its workers."""

    generation: _Count  # the newest in which a worker has begun a step; 0: none, or unknown
    step: _Count | None  # committed; None: unknown
    has_joined: bool = False  # a worker called elastic.join()

    def encode(self) -> bytes:
        """Encode as a frame's payload."""
        return base.encode(dataclasses.asdict(self))

    def has_changed_since(self, before: NodeHeartbeat | None) -> bool:
        """Whether anything but the step has changed."""
        return before is None or replace(before, step=self.step) != self

    @staticmethod
    def decode(payload: bytes) -> NodeHeartbeat:
        """Parse strictly. Raises ProtocolError."""
        try:
            return typed_json.convert(NodeHeartbeat, base.decode(payload))
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


# ----------------------------------------------------------------------------
# Liveness between agents: which nodes are alive, and the newest world, within milliseconds.
#
# Every agent listens on one port, on which it proves its identity. It also keeps one connection to
# the leader: when either process dies, the kernel closes it, and the other side notices at once. A
# closed connection is a suspicion; a probe turns it into a verdict. The
# connection to the previous leader stays open, too: an agent often learns of the new leader before
# the kernel reports the old one's death, and the new leader needs both facts. Peers are reached by
# address: resolving a name may take longer than a lease, and this thread could not answer probes
# meanwhile.
#
# The leader sends every world that it has written over these connections, ahead of the store's
# watch.
#
# Both ends prove that they know the run's secret before any other message
# (:mod:`elastic.wire`). A follower sends heartbeats
# , and the leader sends records of worlds, one per frame. They
# are parsed strictly, and nothing received is executed.

MAX_WORLD = 1 << 20  # etcd accepts no value that is much larger
LIMITS = Limits(
    frame_bytes=128,  # followers send heartbeats
    server_frame_bytes=MAX_WORLD,
    unsent_bytes=2 * MAX_WORLD,  # a follower with more unread data is stuck
    open_connections=4096,
    pending_connections=256,
    pending_per_address=64,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessCallbacks:
    """The events that a :class:`LivenessServer` reports to its owner, on the server's thread."""

    on_opened: Callable[[str, bool], object]
    """``(node_id, is_leader)``: a follower, or the leader, has proved its identity."""

    on_closed: Callable[[str, bool], object]
    """``(node_id, is_leader)``: such a connection has closed, or this node could not connect to
    the leader."""

    on_silent: Callable[[str, bool], object]
    """As ``on_closed``, but the peer's machine stopped responding, and the peer did not close the
    connection: it may be alive."""

    on_dropped: Callable[[str], object]
    """``(node_id)``: this node has closed its connection to a former leader."""

    on_world: Callable[[bytes], object]
    """``(record)``: the leader has sent the record of a world."""

    on_heartbeat: Callable[[str, NodeHeartbeat], object]
    """``(node_id, heartbeat)``: a follower has sent a heartbeat."""

    on_error: Callable[[BaseException], object]
    """``(error)``: the thread has died."""


class LivenessServer(Handler):
    """Listens for peers, and stays connected to the leader. One thread; its owner calls
    ``close``."""

    def __init__(
        self,
        host: str,
        callbacks: LivenessCallbacks,
        *,
        credentials: Credentials,
        limits: Limits = LIMITS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._callbacks = callbacks
        listener = listen(host, backlog=512)
        self._port = int(listener.getsockname()[1])
        self._hub = Hub(
            "elastic-liveness",
            listener,
            self,
            credentials=credentials,
            limits=limits,
            report=get_logger().warning,
            on_error=self._died,
            monotonic=clock.monotonic,
        )
        self._leader: Connection | None = None
        self._former: Connection | None = None
        self._announcement = b""

    # ── from any thread ──────────────────────────────────────────────────────────────────

    @property
    def port(self) -> int:
        return self._port

    def start(self) -> None:
        self._hub.start()

    def follow(self, node_id: str, host: str, port: int) -> None:
        """Keep a connection to this leader, instead of to any other."""
        self._hub.post(lambda: self._connect(node_id, host, port))

    def unfollow(self) -> None:
        """Stop following: there is no leader now, or this node leads."""
        self._hub.post(self._leave_leader)

    def announce(self, record: bytes) -> None:
        """As the leader: send this world's record to every follower, including later ones.

        A record that is too large is not sent: followers receive it by the store's watch.
        """
        if len(record) <= MAX_WORLD:
            self._hub.post(lambda: self._announce(record))

    def report(self, heartbeat: bytes) -> None:
        """As a follower: send this heartbeat to the leader, if a connection to it is open."""
        self._hub.post(lambda: self._report(heartbeat))

    def announce_nothing(self) -> None:
        """The term has ended: stop sending the last world to new followers."""
        self._hub.post(lambda: self._announce(b""))

    def close(self) -> None:
        """Stop the thread and join it."""
        self._hub.close()

    # ── the thread ───────────────────────────────────────────────────────────────────────

    def _died(self, error: BaseException) -> None:
        get_logger().error("liveness thread died", exc_info=error)
        self._callbacks.on_error(error)

    def opened(self, connection: Connection) -> None:
        """Handler: this peer has proved its identity."""
        if not connection.identity:
            raise ProtocolError("its handshake names no node")
        self._callbacks.on_opened(connection.identity, connection.is_outgoing)
        if not connection.is_outgoing and self._announcement:
            self._hub.send(connection, self._announcement)

    def received(self, connection: Connection, payload: bytes) -> None:
        """Handler: a world from the leader, or a follower's heartbeat."""
        if not connection.is_outgoing:
            self._callbacks.on_heartbeat(connection.identity, NodeHeartbeat.decode(payload))
            return
        base.decode(payload)
        self._callbacks.on_world(payload)

    def closed(self, connection: Connection) -> None:
        """Handler: this connection has ended."""
        callbacks = self._callbacks
        report = callbacks.on_silent if connection.fell_silent else callbacks.on_closed
        if connection.is_outgoing:
            if connection is self._former:
                self._former = None
            else:
                self._leader = None
            report(str(connection.data), True)
        elif connection.was_open and connection.identity:
            report(connection.identity, False)

    def _leave_leader(self) -> None:
        leader, self._leader = self._leader, None
        if leader is None:
            return
        if leader.was_open:
            leader, self._former = self._former, leader
        if leader is not None:
            self._hub.drop(leader, notify=False)
            self._callbacks.on_dropped(str(leader.data))

    def _connect(self, node_id: str, host: str, port: int) -> None:
        """Begin to connect. Never blocks: a node that waited for a vanished machine would answer no
        probes, and would be considered lost as well."""
        self._leave_leader()
        if self._former is not None and self._former.data == node_id:
            self._leader, self._former = self._former, None  # it leads again
            return
        try:
            # Agents publish addresses. (Only the probe's thread resolves a name from an older
            # agent.)
            self._leader = self._hub.connect(
                host, port, expected=node_id, within_s=LIVENESS_CONNECT_S, data=node_id
            )
        except OSError:
            self._callbacks.on_closed(node_id, True)

    def _report(self, heartbeat: bytes) -> None:
        if self._leader is not None:
            self._hub.send(self._leader, heartbeat)

    def _announce(self, record: bytes) -> None:
        self._announcement = record
        if not record:
            return
        for connection in self._hub.connections:
            if not connection.is_outgoing:
                self._hub.send(connection, record)


# ----------------------------------------------------------------------------
# The nodes whose liveness connection to this node was lost: half of the proof of a death.
#
# A port that refuses connections has no listener, as seen from this node. That is so after a
# death, but also behind a firewall that rejects, or while a proxy restarts. It proves that the
# process has ended only together with a lost lease or with the end of an open connection. A later
# response is newer evidence, and revokes the proof.


class Connections:
    """Kept across all terms: a node that becomes leader knows which connections it lost as a
    follower. Used on the node's thread only."""

    def __init__(self) -> None:
        self.followers: dict[str, int] = {}  # node_id -> open connections from it
        self.leaders: set[str] = set()  # with an open connection: the current, the previous
        self._lost: set[str] = set()

    def opened(self, node_id: str, is_leader: bool) -> None:
        """A connection has proved the node's id; ``is_leader``: it is this node's to the leader."""
        if is_leader:
            self.leaders.add(node_id)
        else:
            self.followers[node_id] = self.followers.get(node_id, 0) + 1
        self._lost.discard(node_id)

    def closed(self, node_id: str, is_leader: bool, *, is_lost: bool = True) -> None:
        """A connection has ended. It does not count as lost if it was never open, if it was one of
        several, or without ``is_lost``: if it fell silent, the peer's kernel did not close it, and
        its process may live; a peer may close it because it follows another node now."""
        if is_leader:
            was_open = node_id in self.leaders
            self.leaders.discard(node_id)
        else:
            count = self.followers.pop(node_id, 0)
            was_open = count > 0
            if count > 1:
                self.followers[node_id] = count - 1
        if not is_lost:
            return
        if was_open and node_id not in self.followers and node_id not in self.leaders:
            self._lost.add(node_id)

    def dropped(self, node_id: str) -> None:
        """This node has closed its connection to a former leader, which does not count as lost."""
        self.leaders.discard(node_id)

    def answered(self, node_id: str) -> None:
        """The node has responded: an earlier close no longer proves anything."""
        self._lost.discard(node_id)

    def is_lost(self, node_id: str) -> bool:
        """Whether an open connection to this node was lost, and it has not responded since."""
        return node_id in self._lost

    def retain_only(self, node_ids: Container[str]) -> None:
        """Drop the lost connections of all other nodes, which are no longer relevant."""
        self._lost = {node_id for node_id in self._lost if node_id in node_ids}


# ----------------------------------------------------------------------------
# Check whether an agent is alive: one connection, one round trip, a verdict.


@dataclass(frozen=True)
class Verdict:
    """The result of a probe, and the reason for it."""

    liveness: Liveness
    reason: str
    reset: bool = False  # the connection was accepted and then reset
    refused: bool = (
        False  # no agent with that id listens there: half of the proof (:class:`Connections`)
    )


def probe(
    host: str,
    port: int,
    node_id: str,
    *,
    key: SecretKey,
    timeout_s: float,
    tls: Tls | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> Verdict:
    """Have the agent at ``host:port`` prove that it is ``node_id``.

    A refusal, or a response from another agent, is half of the proof that the process has ended: a
    live agent never closes its port, but a firewall may refuse connections to it. A timeout proves
    nothing, nor does a response from another server: only agents of this run have ``key``. If a
    connection is accepted and then reset, the agent is dying, and is probed again after
    PROBE_AGAIN_S.
    """
    verdict = _probe(host, port, node_id, key, timeout_s, tls)
    if verdict.reset:
        clock.sleep(PROBE_AGAIN_S)
        verdict = _probe(host, port, node_id, key, timeout_s, tls)
    return verdict


def _probe(
    host: str, port: int, node_id: str, key: SecretKey, timeout_s: float, tls: Tls | None
) -> Verdict:
    try:
        with (
            socket.create_connection((host, port), timeout=timeout_s) as connection,
            contextlib.closing(Channel(connection, timeout_s=timeout_s, tls=tls)) as channel,
        ):
            # Without this agent's proof the connection does not count as a follower's.
            identity = channel.authenticate(key, expected=None, proves=False)
    except ConnectionRefusedError:
        return Verdict(Liveness.SUSPECT, f"{host}:{port} refuses connections", refused=True)
    except ConnectionResetError:
        return Verdict(Liveness.SUSPECT, f"{host}:{port} reset the connection", reset=True)
    except ProtocolError as error:
        return Verdict(Liveness.SUSPECT, f"{host}:{port} is not an agent of this run: {error}")
    except OSError as error:
        return Verdict(Liveness.SUSPECT, f"{host}:{port} is silent ({error})")
    if identity == node_id:
        return Verdict(Liveness.ALIVE, f"{host}:{port} answers")
    return Verdict(Liveness.SUSPECT, f"{host}:{port} is now another agent", refused=True)
