"""Accepts and serves connections on one thread."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from elastic.wire.base import (
    ACCEPT_AGAIN_S,
    LimitedReports,
    Limits,
    ProtocolError,
    Report,
    Unauthenticated,
    give_up_on_silence,
)
from elastic.wire.handshake import (
    MAX_FRAME,
    ClientHandshake,
    Credentials,
    FrameReader,
    ServerHandshake,
    frame,
)
from elastic.wire.tls import RECORD_BYTES, awaited_event, failure, handshake_step

# ----------------------------------------------------------------------------
# Creates the sockets on which hubs listen, and decides when a hub accepts connections.


def listen(host: str, port: int = 0, *, backlog: int) -> socket.socket:
    """A TCP listener at that address; on all addresses, if it is not one of this machine's own
    (NAT)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=backlog)
    except OSError:
        return socket.create_server(("", port), family=family, backlog=backlog)


def listen_on_path(path: str | os.PathLike[str], *, backlog: int) -> socket.socket:
    """A Unix socket listener."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


class Acceptor:
    """Accepts connections while there is room for them; for the hub's thread.

    Otherwise the selector does not watch the listener: connections wait in the kernel.
    ``room_in_s`` returns the seconds until there is room, given the time; 0 if there is.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        room_in_s: Callable[[float], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._listener = listener
        self._selector = selector
        self._room_in_s = room_in_s
        self._monotonic = monotonic
        self._is_watched = False
        self._resume_at_s = 0.0
        self._waits_for_room = False

    @property
    def resumes_at_s(self) -> tuple[float, ...]:
        """When :meth:`resume` must run; empty if it need not."""
        return () if self._is_watched else (self._resume_at_s,)

    def resume(self) -> None:
        """Watch the listener again, if it is time, or if there is room before that."""
        if self._is_watched:
            return
        now_s = self._monotonic()
        has_room = self._waits_for_room and not self._room_in_s(now_s)
        if has_room or now_s >= self._resume_at_s:
            self._waits_for_room = False
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._is_watched = True

    def close(self) -> None:
        """Stop watching the listener."""
        if self._is_watched:
            self._selector.unregister(self._listener)
            self._is_watched = False

    def accept(self) -> socket.socket | None:
        """The next connection; ``None`` if none is pending, or there is no room for it.

        Raises OSError, and pauses, if the process has no free descriptor.
        """
        if room_in_s := self._room_in_s(self._monotonic()):
            self._pause(room_in_s)
            self._waits_for_room = True
            return None
        try:
            return self._listener.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError:  # accepting at once again would fail in a busy loop
            self._pause(ACCEPT_AGAIN_S)
            raise

    def _pause(self, seconds: float) -> None:
        if self._is_watched:
            self._selector.unregister(self._listener)
        self._is_watched = False
        self._resume_at_s = self._monotonic() + seconds


# ----------------------------------------------------------------------------
# One connection of a hub, all connections of a hub, and the interface of the hub's owner.

READ_BYTES = 1 << 16
# Errors of the kernel about a peer that no longer responds, but may be alive: tcp(7), icmp(7).
_SILENT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})


class State(Enum):
    """The states of a connection, in order; CLOSED may follow any of them."""

    CONNECTING = "connecting"
    SECURING = "securing"  # TLS
    PROVING = "proving"
    OPEN = "open"
    CLOSED = "closed"


class Connection:
    """One connection of a hub, for the hub's thread; ``data`` belongs to the hub's owner."""

    def __init__(self, sock: socket.socket, address: str, *, is_outgoing: bool, limit: int) -> None:
        self.socket = sock
        self.address = address  # of the peer, for its budget and for users
        self.is_outgoing = is_outgoing
        self.identity = ""  # of the peer, as it has proved with the key
        self.was_open = False
        self.fell_silent = False  # it ended because the peer's machine was silent
        self.data: object = None
        self.state = State.CONNECTING if is_outgoing else State.PROVING
        self.handshake: ClientHandshake | ServerHandshake | None = None
        self.is_handshaken = False  # the client's Hello has been answered
        self.reader = FrameReader(MAX_FRAME)
        self.open_limit = limit
        self.unsent = bytearray()
        self.frames = 0  # received
        self.timed_frame = -1  # the frame to which the deadline applies
        # The events to wait for before the next attempt. TLS may have to read in order to write,
        # and vice versa.
        self.read_awaits = selectors.EVENT_READ
        self.send_awaits = selectors.EVENT_WRITE

    @property
    def awaits(self) -> int:
        """The events to select for."""
        return self.read_awaits | (self.send_awaits if self.unsent else 0)

    @property
    def is_closed(self) -> bool:
        return self.state is State.CLOSED

    def receive(self) -> bytes | None:
        """Data that the peer has sent: ``None`` if none has arrived yet, empty if it has closed.

        Raises ProtocolError if TLS rejects the data.
        """
        try:
            chunk = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return None
        except ssl.SSLError as error:
            if awaited := awaited_event(error):
                self.read_awaits = awaited
                return None
            _raise_if_refused(error)
            return b""
        except OSError as error:
            self.fell_silent = error.errno in _SILENT
            return b""
        self.read_awaits = selectors.EVENT_READ
        return chunk

    def send_unsent(self) -> bool:
        """Send what can be sent without waiting; ``False`` if the peer has hung up.

        Raises ProtocolError if TLS rejects the connection.
        """
        self.send_awaits = selectors.EVENT_WRITE
        try:
            while unsent := self.unsent:
                if isinstance(self.socket, ssl.SSLSocket):
                    # OpenSSL accepts all of it or nothing; then the same bytes must be retried.
                    unsent = unsent[:RECORD_BYTES]
                del self.unsent[: self.socket.send(unsent)]
        except BlockingIOError:
            pass
        except ssl.SSLError as error:
            if awaited := awaited_event(error):
                self.send_awaits = awaited
                return True
            _raise_if_refused(error)
            return False
        except OSError as error:
            self.fell_silent = error.errno in _SILENT
            return False
        return True


def _raise_if_refused(error: ssl.SSLError) -> None:
    """TLS has failed permanently: the peer has ended, or refused the connection."""
    why = failure(error)
    if isinstance(why, ProtocolError):
        raise why from error


class HubConnections:
    """All connections of one hub, and their deadlines; for the hub's thread."""

    def __init__(
        self, selector: selectors.BaseSelector, limits: Limits, monotonic: Callable[[], float]
    ) -> None:
        self._selector = selector
        self._limits = limits
        self._monotonic = monotonic
        self._all: set[Connection] = set()
        self._deadlines: dict[Connection, float] = {}
        self.unauthenticated: Unauthenticated[Connection] = Unauthenticated(limits)
        self.accepted_open = 0  # accepted ones that are open

    def __iter__(self) -> Iterator[Connection]:
        return iter(tuple(self._all))

    def add(self, connection: Connection, within_s: float, events: int) -> None:
        """Select for ``events``; the connection must make progress within ``within_s``."""
        self._all.add(connection)
        self.allow(connection, within_s)
        self._selector.register(connection.socket, events, connection)

    def add_accepted(self, connection: Connection) -> None:
        """Add an accepted connection, which must authenticate itself."""
        self.unauthenticated.add(connection, connection.address, self._monotonic())
        self.add(connection, self._limits.handshake_s, selectors.EVENT_READ)

    def allow(self, connection: Connection, seconds: float) -> None:
        """Set its deadline to this many seconds from now."""
        self._deadlines[connection] = self._monotonic() + seconds

    def opened(self, connection: Connection) -> None:
        """It is authenticated: an idle connection has no deadline."""
        self.unauthenticated.discard(connection)
        self._deadlines.pop(connection, None)
        self.accepted_open += not connection.is_outgoing

    def time_message(self, connection: Connection) -> None:
        """A message that has begun must end in time; an idle connection has no deadline."""
        if not connection.reader.is_partial:
            self._deadlines.pop(connection, None)
        elif connection not in self._deadlines or connection.timed_frame != connection.frames:
            connection.timed_frame = connection.frames
            self.allow(connection, self._limits.message_s)

    def watch(self, connection: Connection) -> None:
        """Have the selector wait for the event that the connection needs."""
        if self._selector.get_key(connection.socket).events != connection.awaits:
            self._selector.modify(connection.socket, connection.awaits, connection)

    def forget(self, connection: Connection) -> None:
        """It is closed, or its owner has taken its socket."""
        if connection.state is State.OPEN and not connection.is_outgoing:
            self.accepted_open -= 1
        connection.state = State.CLOSED
        self._all.discard(connection)
        self.unauthenticated.discard(connection)
        self._deadlines.pop(connection, None)
        self._selector.unregister(connection.socket)

    def close(self) -> None:
        """Close all; the selector no longer runs."""
        for connection in self._all:
            connection.state = State.CLOSED
            connection.socket.close()
        self._all.clear()

    @property
    def deadlines_s(self) -> tuple[float, ...]:
        """When connections expire."""
        return tuple(self._deadlines.values())

    def expired(self) -> list[Connection]:
        """Those whose deadline has passed."""
        if not self._deadlines:
            return []
        now_s = self._monotonic()
        return [c for c, at_s in self._deadlines.items() if now_s >= at_s]


class Handler:
    """The owner's handling of a hub's connections, all on the hub's thread.

    A :class:`ProtocolError` from ``admit``, ``opened`` or ``received`` ends that connection. Any
    other exception is a fault of this program, and ends the hub.
    """

    def admit(self, sock: socket.socket) -> str:
        """Return the peer's address, for its budget. Refuse by raising ProtocolError."""
        address = sock.getpeername()
        return str(address[0]) if isinstance(address, tuple) else str(address)

    def opened(self, connection: Connection) -> None:
        """Both ends have proved possession of the key."""

    def received(self, connection: Connection, payload: bytes) -> None:
        """A frame has arrived."""

    def closed(self, connection: Connection) -> None:
        """It has ended, open or not, other than by ``drop(notify=False)``."""


def outgoing_socket(host: str, port: int) -> tuple[socket.socket, Any]:
    """A non-blocking socket, and the address to connect it to. ``host`` is never a name.

    Raises OSError.
    """
    candidates = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )
    family, kind, protocol, _, address = candidates[0]
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    return sock, address


def set_up(sock: socket.socket, silence_s: float) -> None:
    """Disable Nagle's algorithm; end the connection if the peer's machine is silent for
    ``silence_s``."""
    give_up_on_silence(sock, silence_s)
    if sock.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):  # it has ended: the next event reports it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


# ----------------------------------------------------------------------------
# Many authenticated connections on one thread that no peer can block.
#
# A hub owns a listener, the accepted connections, and the outgoing ones. Nothing blocks: received
# bytes are processed as they arrive, unsent bytes wait in a bounded buffer. A peer that violates
# the protocol loses its connection, with one rate-limited line in the log.

ACCEPTS_PER_TURN = 16
_MAX_READS_OF_REST = 64  # a dead process's children may keep writing

OnError = Callable[[BaseException], object]


class Hub:
    """Its owner calls :meth:`close`. ``report`` takes lines for the log, ``on_error`` the exception
    that has ended the thread."""

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        handler: Handler,
        *,
        credentials: Credentials,
        limits: Limits,
        report: Report,
        on_error: OnError = lambda error: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.limits = limits
        self._listener = listener
        self._handler = handler
        self._key = credentials.key
        self._identity = credentials.identity
        self._tls = credentials.tls
        self._report = LimitedReports(report, monotonic=monotonic)
        self._on_error = on_error
        self._monotonic = monotonic
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakee = socket.socketpair()
        for sock in (listener, self._waker, self._wakee):
            sock.setblocking(False)
        self._requests: deque[Callable[[], object]] = deque()
        self._all = HubConnections(self._selector, limits, monotonic)
        self._acceptor = self._new_acceptor()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # -- from any thread ----------------------------------------------------------------------

    def start(self) -> None:
        """Listen."""
        self._thread.start()

    def close(self) -> None:
        """End all connections, free the port, join. Idempotent."""
        self._closing = True
        self.wake()
        if self._thread.ident is None:
            self._release()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def post(self, request: Callable[[], object]) -> None:
        """Run this on the hub's thread, in order; discarded once the hub is closed."""
        self._requests.append(request)
        self.wake()

    def listen_on(self, listener: socket.socket) -> None:
        """Listen on another socket from now on: nobody can reach the present one any more."""
        listener.setblocking(False)
        self.post(lambda: self._replace_listener(listener))

    def wake(self) -> None:
        """Wake the thread. (By a byte: a forked child may hold the other end, too.)"""
        with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
            self._waker.send(b"x")

    @property
    def is_closing(self) -> bool:
        return self._closing

    # -- on the hub's thread ------------------------------------------------------------------

    @property
    def connections(self) -> tuple[Connection, ...]:
        """Those that are open."""
        return tuple(c for c in self._all if c.state is State.OPEN)

    def connect(
        self, host: str, port: int, *, expected: str, within_s: float, data: object = None
    ) -> Connection:
        """Start to connect to the server with this identity, at an address (never a name), which
        must accept within ``within_s``.

        ``Handler.opened`` or ``Handler.closed`` reports the result. Raises OSError.
        """
        sock, address = outgoing_socket(host, port)
        limit = self.limits.server_frame_bytes
        connection = Connection(sock, f"{host}:{port}", is_outgoing=True, limit=limit)
        connection.data = data
        connection.handshake = ClientHandshake(self._key(), self._identity, expected=expected)
        self._all.add(connection, within_s, selectors.EVENT_WRITE)
        status = sock.connect_ex(address)
        if status not in (0, errno.EINPROGRESS):
            self.post(lambda: self.drop(connection))
        return connection

    def send(self, connection: Connection, payload: bytes) -> None:
        """Send without blocking, and buffer the rest until the peer has read.

        If the buffer exceeds its limit, the connection ends.
        """
        if connection.state is State.OPEN:
            self._queue(connection, payload)

    def watch(self, descriptor: int, callback: Callable[[], object]) -> None:
        """Call ``callback`` whenever ``descriptor`` is readable."""
        self._selector.register(descriptor, selectors.EVENT_READ, callback)

    def unwatch(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    def drain(self, connection: Connection) -> None:
        """Read data that has arrived but was not read yet: its sender may be dead."""
        for _ in range(_MAX_READS_OF_REST):
            if connection.is_closed or not self._read(connection):
                return

    def detach(self, connection: Connection) -> tuple[socket.socket, bytes]:
        """Give an open connection away: its socket, now blocking, and the data it has sent
        since."""
        self._all.forget(connection)
        connection.socket.setblocking(True)
        return connection.socket, connection.reader.take(READ_BYTES * 2)

    def drop(self, connection: Connection, why: str = "", *, notify: bool = True) -> None:
        """Close it. ``why`` is logged; without ``notify`` the handler is not called."""
        if connection.is_closed:
            return
        self._all.forget(connection)
        connection.socket.close()
        if why:
            self._report(f"{self.name}: {connection.address} is disconnected: {why}")
        if notify and not self._closing:
            self._handler.closed(connection)

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._selector.register(self._wakee, selectors.EVENT_READ)
            while not self._closing:
                self._acceptor.resume()
                for key, events in self._selector.select(self._patience_s()):
                    if not self._closing:
                        self._turn(key, events)
                self._expire()
        except BaseException as error:
            self._on_error(error)
            raise
        finally:
            self._closing = True
            self._release()

    def _new_acceptor(self) -> Acceptor:
        room_in_s = self._all.unauthenticated.room_in_s
        return Acceptor(self._listener, self._selector, room_in_s, self._monotonic)

    def _replace_listener(self, listener: socket.socket) -> None:
        self._acceptor.close()
        self._listener.close()
        self._listener = listener
        self._acceptor = self._new_acceptor()

    def _release(self) -> None:
        self._all.close()
        self._requests.clear()
        for sock in (self._listener, self._waker, self._wakee):
            sock.close()
        self._selector.close()

    def _turn(self, key: selectors.SelectorKey, events: int) -> None:
        if isinstance(connection := key.data, Connection):
            self._serve(connection, events)
        elif key.data is not None:
            key.data()
        elif key.fileobj is self._listener:
            self._accept()
        else:
            self._wakee.recv(4096)
            while self._requests and not self._closing:
                self._requests.popleft()()

    def _serve(self, connection: Connection, events: int) -> None:
        # (An earlier event of the same round may have had it dropped.)
        if connection.state is State.CONNECTING:
            self._connected(connection)
            return
        if connection.state is State.SECURING:
            self._secure(connection)
            return
        if connection.unsent and events & connection.send_awaits and not connection.is_closed:
            self._flush(connection)
        if events & connection.read_awaits and not connection.is_closed:
            self._read(connection)

    def _patience_s(self) -> float | None:
        waits_s = [*self._all.deadlines_s, *self._acceptor.resumes_at_s]
        at_s = min(waits_s, default=None)
        return None if at_s is None else max(0.0, at_s - self._monotonic())

    def _expire(self) -> None:
        for connection in self._all.expired():
            if connection.state is State.OPEN:
                self.drop(connection, f"a message took over {self.limits.message_s:g} s")
            elif connection.is_outgoing:
                self.drop(connection)
            else:
                self.drop(connection, f"no proof within {self.limits.handshake_s:g} s")

    # -- accepted connections -----------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock = self._acceptor.accept()
            except OSError as error:  # no descriptor is free
                self._report(f"{self.name}: cannot accept a connection: {error}")
                if (oldest := self._all.unauthenticated.oldest) is not None:
                    self.drop(oldest)
                return
            if sock is None:
                return
            self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        try:
            address = self._handler.admit(sock)
        except ProtocolError as error:
            self._report(f"{self.name}: refused a connection: {error}")
            sock.close()
            return
        except OSError:  # it has already ended
            sock.close()
            return
        for oldest in (
            self._all.unauthenticated.to_evict_of(address),
            self._all.unauthenticated.to_evict(),
        ):
            if oldest is not None:
                self.drop(oldest, "too many unauthenticated connections")
        sock.setblocking(False)
        set_up(sock, self.limits.silence_s)
        if self._tls is not None:
            try:
                sock = self._tls.wrap(sock, server_side=True)
            except OSError:  # it has already ended
                return
        connection = Connection(sock, address, is_outgoing=False, limit=self.limits.frame_bytes)
        connection.state = State.PROVING if self._tls is None else State.SECURING
        connection.handshake = ServerHandshake(self._key(), self._identity)
        self._all.add_accepted(connection)

    def _connected(self, connection: Connection) -> None:
        sock = connection.socket
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0:
            self.drop(connection)
            return
        set_up(sock, self.limits.silence_s)
        self._all.allow(connection, self.limits.handshake_s)
        if self._tls is None:
            self._prove_to_server(connection)
            return
        try:  # (The same descriptor, by which the selector knows it.)
            connection.socket = self._tls.wrap(sock, server_side=False)
        except OSError:
            self.drop(connection)
            return
        connection.state = State.SECURING
        self._secure(connection)

    def _secure(self, connection: Connection) -> None:
        """Perform the next step of the TLS handshake; after the last one the protocol begins."""
        assert isinstance(connection.socket, ssl.SSLSocket)
        try:
            awaited = handshake_step(connection.socket)
        except ProtocolError as error:
            self.drop(connection, str(error))
            return
        except OSError as error:  # it has ended, or has no TLS and closed on unexpected data
            self.drop(connection, str(error) if connection.is_outgoing else "")
            return
        self._selector.modify(connection.socket, awaited or connection.awaits, connection)
        if awaited:
            return
        connection.state = State.PROVING
        if connection.is_outgoing:
            self._prove_to_server(connection)
        else:
            self._read(connection)

    def _prove_to_server(self, connection: Connection) -> None:
        connection.state = State.PROVING
        assert isinstance(connection.handshake, ClientHandshake)
        self._queue(connection, connection.handshake.hello)

    # -- bytes --------------------------------------------------------------------------------

    def _read(self, connection: Connection) -> bool:
        """Read once; whether there may be more."""
        try:
            chunk = connection.receive()
        except ProtocolError as error:
            self.drop(connection, str(error))
            return False
        if chunk == b"":
            self.drop(connection)
            return False
        self._all.watch(connection)
        if chunk is None:
            return False
        connection.reader.feed(chunk)
        try:
            self._take_frames(connection)
        except ProtocolError as error:
            self.drop(connection, str(error))
        if not connection.is_closed and connection.state is State.OPEN:
            self._all.time_message(connection)
        return not connection.is_closed

    def _take_frames(self, connection: Connection) -> None:
        while not connection.is_closed and (payload := connection.reader.next()) is not None:
            connection.frames += 1
            if connection.state is State.OPEN:
                self._handler.received(connection, payload)
            else:
                self._prove(connection, payload)

    def _prove(self, connection: Connection, payload: bytes) -> None:
        handshake = connection.handshake
        if isinstance(handshake, ClientHandshake):
            self._queue(connection, handshake.answer(payload))
            self._open_up(connection, handshake.peer)
        elif isinstance(handshake, ServerHandshake) and not connection.is_handshaken:
            connection.is_handshaken = True
            self._queue(connection, handshake.challenge(payload))
        elif isinstance(handshake, ServerHandshake):
            handshake.verify(payload)
            if (count := self._all.accepted_open) >= self.limits.open_connections:
                raise ProtocolError(f"there are {count} connections already")
            self._open_up(connection, handshake.peer)

    def _open_up(self, connection: Connection, identity: str) -> None:
        if connection.is_closed:  # it had ended before the response
            return
        connection.handshake = None
        connection.identity = identity
        connection.was_open = True
        connection.state = State.OPEN
        connection.reader.limit = connection.open_limit
        self._all.opened(connection)
        self._handler.opened(connection)

    def _queue(self, connection: Connection, payload: bytes) -> None:
        connection.unsent += frame(payload)
        if len(connection.unsent) > self.limits.unsent_bytes:
            self.drop(connection, f"it leaves {len(connection.unsent)} bytes unread")
            return
        self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        try:
            is_connected = connection.send_unsent()
        except ProtocolError as error:
            self.drop(connection, str(error))
            return
        if is_connected:
            self._all.watch(connection)
        else:
            self.drop(connection)
