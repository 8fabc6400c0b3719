"""Liveness between agents: who is there, and which world is the newest, within milliseconds.

Every agent listens on one port and proves there that it is itself. It also holds one
connection to the leader: when either process dies the kernel closes it, and the other side
hears of it at once. A close is a suspicion; :mod:`elastic.liveness.probe` turns it into a verdict.
The connection to the leader before this one stays open, too: word that another node has deposed
it often comes before the kernel's word that it has died, and whoever leads next needs both.
Peers are reached by address: to resolve a name may take longer than a lease, and nobody would be
answered meanwhile.

The leader sends every world it has written down these connections, ahead of the store's watch.

Both ends prove that they know the run's secret before anything else is said
(:mod:`elastic.secure_channel`). A follower sends nothing more; the leader sends records of
worlds, one per frame, which are parsed strictly. Nothing received is executed.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.secure_channel import strict_json
from elastic.secure_channel.acceptor import listen
from elastic.secure_channel.connection import Connection, Handler
from elastic.secure_channel.errors import ProtocolError
from elastic.secure_channel.hub import Hub
from elastic.secure_channel.keys import SecretKey
from elastic.secure_channel.limits import Limits
from elastic.secure_channel.tls import Tls
from elastic.telemetry.log import get_logger
from elastic.tuning.agent_intervals import LIVENESS_CONNECT_S

MAX_WORLD = 1 << 20  # etcd takes no value that is much larger
LIMITS = Limits(
    frame_bytes=64,  # followers say nothing
    server_frame_bytes=MAX_WORLD,
    unsent_bytes=2 * MAX_WORLD,  # a follower that reads no more than that is stuck
    open_connections=4096,
    pending_connections=256,
    pending_per_address=64,
)


class LivenessServer(Handler):
    """Listens, answers, follows the leader. One thread, owned by whoever calls ``close``.

    All callbacks run on that thread: ``on_opened(node_id, is_leader)`` when a follower has proved
    itself or the leader has, ``on_closed(node_id, is_leader)`` when such a connection closes, or
    ours to the leader could not be made, ``on_dropped(node_id)`` when this node closes one to a
    former leader, ``on_world(record)`` when the leader sent a world, ``on_error`` if the thread
    dies. ``on_silent`` is called instead of ``on_closed`` where nobody closed the connection, but
    nothing came from the peer's machine: it may live.
    """

    def __init__(
        self,
        node_id: str,
        host: str,
        on_closed: Callable[[str, bool], None],
        on_error: Callable[[BaseException], None] = lambda error: None,
        on_world: Callable[[bytes], None] = lambda record: None,
        on_opened: Callable[[str, bool], None] = lambda node_id, is_leader: None,
        on_dropped: Callable[[str], None] = lambda node_id: None,
        *,
        on_silent: Callable[[str, bool], None] | None = None,
        key: Callable[[], SecretKey],
        tls: Tls | None = None,
        limits: Limits = LIMITS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._on_closed = on_closed
        self._on_silent = on_silent or on_closed
        self._on_error = on_error
        self._on_world = on_world
        self._on_opened = on_opened
        self._on_dropped = on_dropped
        listener = listen(host, backlog=512)
        self._port = int(listener.getsockname()[1])
        self._hub = Hub(
            "elastic-liveness",
            listener,
            self,
            key=key,
            identity=node_id,
            limits=limits,
            report=get_logger().warning,
            tls=tls,
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
        """Hold a connection to this leader, instead of any other."""
        self._hub.post(lambda: self._connect(node_id, host, port))

    def unfollow(self) -> None:
        """There is no leader now, or this node is it."""
        self._hub.post(self._leave_leader)

    def announce(self, record: bytes) -> None:
        """As the leader: send this world's record to every follower, also to later ones.

        Too large a record is left to the store's watch.
        """
        if len(record) <= MAX_WORLD:
            self._hub.post(lambda: self._announce(record))

    def announce_nothing(self) -> None:
        """The term is over: later followers are told no world."""
        self._hub.post(lambda: self._announce(b""))

    def close(self) -> None:
        """Stop and join."""
        self._hub.close()

    # ── the thread ───────────────────────────────────────────────────────────────────────

    def _died(self, error: BaseException) -> None:
        get_logger().error("liveness thread died", exc_info=error)
        self._on_error(error)

    def opened(self, connection: Connection) -> None:
        """Handler's: this peer has proved itself."""
        if not connection.identity:
            raise ProtocolError("its handshake names no node")
        self._on_opened(connection.identity, connection.is_outgoing)
        if not connection.is_outgoing and self._announcement:
            self._hub.send(connection, self._announcement)

    def received(self, connection: Connection, payload: bytes) -> None:
        """Handler's: a world, if it is the leader's."""
        if not connection.is_outgoing:
            raise ProtocolError("a follower sends no messages")
        strict_json.decode(payload)
        self._on_world(payload)

    def closed(self, connection: Connection) -> None:
        """Handler's."""
        tell = self._on_silent if connection.fell_silent else self._on_closed
        if connection.is_outgoing:
            if connection is self._former:
                self._former = None
            else:
                self._leader = None
            tell(str(connection.data), True)
        elif connection.was_open and connection.identity:
            tell(connection.identity, False)

    def _leave_leader(self) -> None:
        leader, self._leader = self._leader, None
        if leader is None:
            return
        if leader.was_open:
            leader, self._former = self._former, leader
        if leader is not None:
            self._hub.drop(leader, tell=False)
            self._on_dropped(str(leader.data))

    def _connect(self, node_id: str, host: str, port: int) -> None:
        """Begin to connect. Never blocks: a node that waits for a vanished machine would be
        silent itself, and taken for lost with it."""
        self._leave_leader()
        if self._former is not None and self._former.data == node_id:
            self._leader, self._former = self._former, None  # it leads again
            return
        try:
            # Agents publish addresses. (A name of an older one is left to the probe's thread.)
            self._leader = self._hub.connect(
                host, port, expected=node_id, within_s=LIVENESS_CONNECT_S, data=node_id
            )
        except OSError:
            self._on_closed(node_id, True)

    def _announce(self, record: bytes) -> None:
        self._announcement = record
        if not record:
            return
        for connection in self._hub.connections:
            if not connection.is_outgoing:
                self._hub.send(connection, record)
