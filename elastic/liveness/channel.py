"""Liveness between agents: which nodes are alive, and the newest world, within milliseconds.

Every agent listens on one port, on which it proves its identity. It also keeps one connection to
the leader: when either process dies, the kernel closes it, and the other side notices at once. A
closed connection is a suspicion; :mod:`elastic.liveness.probe` turns it into a verdict.
The connection to the previous leader stays open, too: an agent often learns of the new leader
before the kernel reports the old one's death, and the new leader needs both facts.
Peers are reached by address: resolving a name may take longer than a lease, and this thread could
not answer probes meanwhile.

The leader sends every world that it has written over these connections, ahead of the store's watch.

Both ends prove that they know the run's secret before any other message
(:mod:`elastic.secure_channel`). A follower sends heartbeats (:mod:`elastic.liveness.heartbeats`),
and the leader sends records of worlds, one per frame. They are parsed strictly, and nothing
received is executed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.liveness.heartbeats import NodeHeartbeat
from elastic.secure_channel import strict_json
from elastic.secure_channel.acceptor import listen
from elastic.secure_channel.connection import Connection, Handler
from elastic.secure_channel.errors import ProtocolError
from elastic.secure_channel.handshake import Credentials
from elastic.secure_channel.hub import Hub
from elastic.secure_channel.limits import Limits
from elastic.telemetry.log import get_logger
from elastic.tuning.agent_intervals import LIVENESS_CONNECT_S

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
        strict_json.decode(payload)
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
