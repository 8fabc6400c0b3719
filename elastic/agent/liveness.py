"""Liveness between agents: who is there, and which world is the newest, within milliseconds.

Every agent listens on one port and answers a hello with its own id. It also holds one
connection to the leader: when either process dies the kernel closes it, and the other side
hears of it at once. A close is a suspicion; :mod:`elastic.agent.probe` turns it into a verdict.
Peers are reached by address: to resolve a name may take longer than a lease, and nobody would be
answered meanwhile.

The leader sends every world it has written down these connections, ahead of the store's watch.

One JSON object per line in each direction, at most ``MAX_LINE`` bytes (``MAX_WORLD`` from the
leader); anything else closes the connection. Nothing received is executed: of others only the
id is used, of the leader only the world's record, which is parsed strictly.
"""

from __future__ import annotations

import errno
import json
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic.agent.probe import MAX_LINE, from_line, to_line
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.telemetry.log import get_logger

MAX_WORLD = 1 << 20  # etcd takes no value that is much larger
MAX_UNSENT = 2 * MAX_WORLD  # a follower that reads no more than that is stuck
MAX_CONNECTIONS = 4096
CONNECT_TIMEOUT_S = 1.0


@dataclass(eq=False)
class _Peer:
    """One connection: accepted from a follower or a prober, or ours to the leader."""

    connection: socket.socket
    node_id: str | None = None  # set by a follower's hello, and for our leader
    is_leader: bool = False
    is_known: bool = False  # it has shown its id
    connect_by_s: float | None = None  # still connecting, until then
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class LivenessServer:
    """Listens, answers, follows the leader. One thread, owned by whoever calls ``close``.

    All callbacks run on that thread: ``on_opened(node_id, is_leader)`` when a follower said hello
    or the leader answered ours, ``on_closed(node_id, is_leader)`` when a connection that had a
    hello closes, or ours to the leader does or could not be made, ``on_world(record)`` when the
    leader sent a world, ``on_error`` if the thread dies.
    """

    def __init__(
        self,
        node_id: str,
        host: str,
        on_closed: Callable[[str, bool], None],
        on_error: Callable[[BaseException], None] = lambda error: None,
        on_world: Callable[[bytes], None] = lambda record: None,
        on_opened: Callable[[str, bool], None] = lambda node_id, is_leader: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._node_id = node_id
        self._on_closed = on_closed
        self._on_error = on_error
        self._on_world = on_world
        self._on_opened = on_opened
        self._clock = clock
        self._listener = _listen(host)
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakee = socket.socketpair()
        self._requests: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._leader: _Peer | None = None
        self._announcement = b""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="elastic-liveness", daemon=True)

    # ── from any thread ──────────────────────────────────────────────────────────────────

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        self._thread.start()

    def follow(self, node_id: str, host: str, port: int) -> None:
        """Hold a connection to this leader, instead of any other."""
        self._ask(lambda: self._connect(node_id, host, port))

    def unfollow(self) -> None:
        """Drop the connection to the leader."""
        self._ask(self._forget_leader)

    def announce(self, record: bytes) -> None:
        """As the leader: send this world's record to every follower, also to later ones.

        Too large a record is left to the store's watch.
        """
        line = b'{"world":' + record + b"}\n"
        if len(line) <= MAX_WORLD:
            self._ask(lambda: self._announce(line))

    def announce_nothing(self) -> None:
        """The term is over: later followers are told no world."""
        self._ask(lambda: self._announce(b""))

    def close(self) -> None:
        """Stop and join."""
        self._closing = True
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _ask(self, request: Callable[[], None]) -> None:
        with self._lock:
            self._requests.append(request)
        self._wake()

    def _wake(self) -> None:
        try:
            self._waker.send(b"x")
        except OSError:  # closed already: there is nobody to wake
            return

    # ── the thread ───────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            for sock in (self._listener, self._wakee):
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ)
            while not self._closing:
                for key, mask in self._selector.select(self._patience_s()):
                    self._turn(key, mask)
                self._give_up_connecting()
        except BaseException as error:
            get_logger().exception("liveness thread died")
            self._on_error(error)
            raise
        finally:
            self._release()

    def _release(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._waker.close()
        self._listener.close()

    def _turn(self, key: selectors.SelectorKey, mask: int) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fileobj is self._wakee:
            self._wakee.recv(4096)
            with self._lock:
                requests, self._requests = self._requests, []
            for request in requests:
                request()
        elif isinstance(key.data, _Peer) and key.data.connection.fileno() != -1:
            # (-1: an earlier event of the same round had this connection dropped.)
            if key.data.connect_by_s is not None:
                self._connected(key.data)
            elif mask & selectors.EVENT_WRITE and not self._flush(key.data):
                self._drop(key.data, tell=True)
            elif mask & selectors.EVENT_READ:
                self._read(key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._selector.get_map()) >= MAX_CONNECTIONS:
            connection.close()
            return
        self._register(_Peer(connection), selectors.EVENT_READ)

    def _register(self, peer: _Peer, events: int) -> None:
        peer.connection.setblocking(False)
        self._selector.register(peer.connection, events, peer)

    # ── our connection to the leader ─────────────────────────────────────────────────────

    def _forget_leader(self) -> None:
        if self._leader is not None:
            self._drop(self._leader, tell=False)

    def _connect(self, node_id: str, host: str, port: int) -> None:
        """Begin to connect. Never blocks: a node that waits for a vanished machine would be
        silent itself, and taken for lost with it."""
        self._forget_leader()
        try:
            # Agents publish addresses. (A name of an older one is left to the probe's thread.)
            found = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
            family, kind, protocol, _, address = found[0]
            connection = socket.socket(family, kind, protocol)
        except OSError:
            self._on_closed(node_id, True)
            return
        connection.setblocking(False)
        by_s = self._clock.monotonic() + CONNECT_TIMEOUT_S
        peer = _Peer(connection, node_id=node_id, is_leader=True, connect_by_s=by_s)
        self._leader = peer
        self._register(peer, selectors.EVENT_WRITE)
        if connection.connect_ex(address) not in (0, errno.EINPROGRESS):
            self._drop(peer, tell=True)

    def _connected(self, peer: _Peer) -> None:
        peer.connect_by_s = None
        if peer.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0:
            self._drop(peer, tell=True)
            return
        peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if not self._send(peer, to_line({"hello": self._node_id})):
            self._drop(peer, tell=True)

    def _patience_s(self) -> float | None:
        by_s = self._leader.connect_by_s if self._leader is not None else None
        return None if by_s is None else max(0.0, by_s - self._clock.monotonic())

    def _give_up_connecting(self) -> None:
        if self._leader is not None and self._patience_s() == 0:
            self._drop(self._leader, tell=True)

    # ── bytes ────────────────────────────────────────────────────────────────────────────

    def _read(self, peer: _Peer) -> None:
        limit = MAX_WORLD if peer.is_leader else MAX_LINE
        try:
            chunk = peer.connection.recv(min(limit, 1 << 16))
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        *lines, peer.received = (peer.received + chunk).split(b"\n")
        for line in lines:
            if len(line) > limit or not self._take(peer, bytes(line)):
                self._drop(peer, tell=True)
                return
        if not chunk or len(peer.received) > limit:
            self._drop(peer, tell=True)

    def _take(self, peer: _Peer, line: bytes) -> bool:
        message = from_line(line)
        if message is None:
            return False
        if peer.is_leader:
            if isinstance(world := message.get("world"), dict):
                self._on_world(json.dumps(world).encode())
            elif (answer := message.get("node_id")) is not None:  # to our hello
                if answer != peer.node_id:
                    return False  # the port is another agent's by now
                self._show(peer)
            return True
        hello = message.get("hello")
        if not isinstance(hello, str):
            return self._send(peer, to_line({"node_id": self._node_id}))
        if not peer.is_known:
            peer.node_id = hello
            self._show(peer)
        return self._send(peer, to_line({"node_id": self._node_id}) + self._announcement)

    def _show(self, peer: _Peer) -> None:
        if not peer.is_known and peer.node_id is not None:
            peer.is_known = True
            self._on_opened(peer.node_id, peer.is_leader)

    def _announce(self, line: bytes) -> None:
        self._announcement = line
        for key in list(self._selector.get_map().values()):
            peer = key.data
            is_follower = isinstance(peer, _Peer) and peer.node_id and not peer.is_leader
            if line and is_follower and not self._send(peer, line):
                self._drop(peer, tell=True)

    def _send(self, peer: _Peer, data: bytes) -> bool:
        """Send what goes at once, keep the rest for when the peer has read. False: give it up."""
        peer.unsent += data
        return len(peer.unsent) <= MAX_UNSENT and self._flush(peer)

    def _flush(self, peer: _Peer) -> bool:
        try:
            while peer.unsent:
                sent = peer.connection.send(peer.unsent)
                del peer.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            return False
        write = selectors.EVENT_WRITE if peer.unsent else 0
        self._selector.modify(peer.connection, selectors.EVENT_READ | write, peer)
        return True

    def _drop(self, peer: _Peer, *, tell: bool) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer is self._leader:
            self._leader = None
        if tell and peer.node_id is not None and not self._closing:
            self._on_closed(peer.node_id, peer.is_leader)


def _listen(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=512)
    except OSError:
        # --local-addr may name an address that is not an interface of this machine (NAT).
        return socket.create_server(("", 0), family=family, backlog=512)
