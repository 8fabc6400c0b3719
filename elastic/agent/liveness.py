"""Liveness between agents: who is there, told by TCP within milliseconds.

Every agent listens on one port and answers a hello with its own id. It also holds one
connection to the leader: when either process dies the kernel closes it, and the other side
hears of it at once. A close is a suspicion; :func:`probe` turns it into a verdict.

One JSON object per line in each direction, at most ``MAX_LINE`` bytes; anything else closes the
connection. Nothing received is executed, and only the sender's id is ever used.
"""

from __future__ import annotations

import json
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.coordination.membership import Liveness
from elastic.telemetry.log import get_logger

MAX_LINE = 1024
MAX_CONNECTIONS = 4096
CONNECT_TIMEOUT_S = 1.0
RESET_AGAIN_S = 0.05


@dataclass(frozen=True)
class Verdict:
    """What a probe found."""

    liveness: Liveness
    reason: str
    reset: bool = False  # the connection was accepted and then reset


def probe(
    host: str, port: int, node_id: str, *, timeout_s: float, clock: Clock = SYSTEM_CLOCK
) -> Verdict:
    """Ask the agent at ``host:port`` whether it is ``node_id``.

    Refused, or answered by another agent: the process is gone, for a live agent never closes
    its port. Silence is no proof. A connection that is accepted and reset has met an agent
    dying: it is asked again, when its port refuses.
    """
    verdict = _probe(host, port, node_id, timeout_s)
    if verdict.reset:
        clock.sleep(RESET_AGAIN_S)
        verdict = _probe(host, port, node_id, timeout_s)
    return verdict


def _probe(host: str, port: int, node_id: str, timeout_s: float) -> Verdict:
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            connection.sendall(_line({"probe": node_id}))
            answer = _read_line(connection)
    except ConnectionRefusedError:
        return Verdict(Liveness.DEAD, f"{host}:{port} refuses connections")
    except ConnectionResetError:
        return Verdict(Liveness.SUSPECT, f"{host}:{port} reset the connection", reset=True)
    except OSError as error:
        return Verdict(Liveness.SUSPECT, f"{host}:{port} is silent ({error})")
    if answer.get("node_id") == node_id:
        return Verdict(Liveness.ALIVE, f"{host}:{port} answers")
    if isinstance(answer.get("node_id"), str):
        return Verdict(Liveness.DEAD, f"{host}:{port} is now another agent")
    return Verdict(Liveness.SUSPECT, f"{host}:{port} does not speak this protocol")


def _line(message: dict[str, str]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _read_line(connection: socket.socket) -> dict[str, object]:
    data = b""
    while not data.endswith(b"\n"):
        if len(data) > MAX_LINE:
            return {}
        chunk = connection.recv(MAX_LINE)
        if not chunk:
            raise ConnectionResetError
        data += chunk
    return _parse(data) or {}


def _parse(line: bytes) -> dict[str, object] | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


@dataclass
class _Peer:
    """One connection: accepted from a follower or a prober, or ours to the leader."""

    connection: socket.socket
    node_id: str | None = None  # set by a follower's hello, and for our leader
    is_leader: bool = False
    buffer: bytes = b""


@dataclass
class _Request:
    """The leader to follow, or None."""

    target: tuple[str, str, int] | None


class LivenessServer:
    """Listens, answers, follows the leader. One thread, owned by whoever calls ``close``.

    ``on_closed(node_id, is_leader)`` runs on that thread when a connection that had a hello
    (or ours to the leader) closes; ``on_error`` if the thread dies.
    """

    def __init__(
        self,
        node_id: str,
        host: str,
        on_closed: Callable[[str, bool], None],
        on_error: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._node_id = node_id
        self._on_closed = on_closed
        self._on_error = on_error
        self._listener = _listen(host)
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakee = socket.socketpair()
        self._requests: list[_Request] = []
        self._lock = threading.Lock()
        self._leader: _Peer | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="elastic-liveness", daemon=True)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        self._thread.start()

    def follow(self, node_id: str, host: str, port: int) -> None:
        """Hold a connection to this leader, instead of any other."""
        self._ask(_Request((node_id, host, port)))

    def unfollow(self) -> None:
        """Drop the connection to the leader."""
        self._ask(_Request(None))

    def close(self) -> None:
        """Stop and join."""
        self._closing = True
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _ask(self, request: _Request) -> None:
        with self._lock:
            self._requests.append(request)
        self._wake()

    def _wake(self) -> None:
        try:
            self._waker.send(b"x")
        except OSError:  # closed already: there is nobody to wake
            return

    def _run(self) -> None:
        try:
            for sock in (self._listener, self._wakee):
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ)
            while not self._closing:
                for key, _ in self._selector.select():
                    self._turn(key)
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

    def _turn(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif key.fileobj is self._wakee:
            self._wakee.recv(4096)
            self._obey()
        elif isinstance(key.data, _Peer) and key.data.connection.fileno() != -1:
            # (-1: an earlier event of the same round had this connection dropped.)
            self._read(key.data)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._selector.get_map()) >= MAX_CONNECTIONS:
            connection.close()
            return
        self._register(_Peer(connection))

    def _register(self, peer: _Peer) -> None:
        peer.connection.setblocking(False)
        self._selector.register(peer.connection, selectors.EVENT_READ, peer)

    def _obey(self) -> None:
        with self._lock:
            requests, self._requests = self._requests, []
        if not requests:
            return
        if self._leader is not None:
            leader, self._leader = self._leader, None
            self._drop(leader, tell=False)
        target = requests[-1].target
        if target is not None:
            self._connect(*target)

    def _connect(self, node_id: str, host: str, port: int) -> None:
        try:
            connection = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.sendall(_line({"hello": self._node_id}))
        except OSError:
            self._on_closed(node_id, True)
            return
        self._leader = _Peer(connection, node_id=node_id, is_leader=True)
        self._register(self._leader)

    def _read(self, peer: _Peer) -> None:
        try:
            chunk = peer.connection.recv(MAX_LINE)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        peer.buffer += chunk
        if not chunk or len(peer.buffer) > MAX_LINE:
            self._drop(peer, tell=True)
            return
        while b"\n" in peer.buffer:
            line, peer.buffer = peer.buffer.split(b"\n", 1)
            if not self._answer(peer, line):
                self._drop(peer, tell=True)
                return

    def _answer(self, peer: _Peer, line: bytes) -> bool:
        if peer.is_leader:
            return True  # the leader's answer to our hello
        message = _parse(line)
        if message is None:
            return False
        hello = message.get("hello")
        if isinstance(hello, str):
            peer.node_id = hello
        try:
            peer.connection.sendall(_line({"node_id": self._node_id}))
        except OSError:
            return False
        return True

    def _drop(self, peer: _Peer, *, tell: bool) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer is self._leader:
            self._leader = None
        if tell and peer.node_id is not None and not self._closing:
            self._on_closed(peer.node_id, peer.is_leader)


def _listen(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0), backlog=512)
    except OSError:
        # --local-addr may name an address that is not an interface of this machine (NAT).
        return socket.create_server(("", 0), backlog=512)
