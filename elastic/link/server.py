"""The agent's end of the links: one unix socket, one thread, a pidfd for every worker.

A worker's death is told by its pidfd within milliseconds, never by its socket: forked data
workers inherit that and keep it open. Whoever connects is known by SO_PEERCRED, not by what it
says.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import selectors
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import LinkError
from elastic.link.peer import Peer, calls_itself, has_ended, how_it_ended, peer_of
from elastic.link.protocol import (
    FROM_WORKER,
    PROTOCOL_VERSION,
    Bye,
    Hello,
    LineBuffer,
    Message,
    Welcome,
    decode,
    encode,
)
from elastic.telemetry.log import get_logger

MAX_CONNECTIONS = 256
MAX_UNSENT_BYTES = 1 << 20
HELLO_WITHIN_S = 5.0
LONGEST_TEMP_FOLDER = 60  # bytes: a unix socket's path has room for 107
_READS_AT_THE_END = 64  # a dead worker's children may write for ever


@dataclass(frozen=True)
class Worker:
    """A worker that has said hello."""

    pid: int
    local_rank: int
    token: int  # of this connection


@dataclass(frozen=True)
class WorkerDeath:
    """How a worker's process ended."""

    pid: int
    exit_code: int | None  # None: ended by a signal, or not a child of this process
    signal: int | None
    said_bye: Bye | None


@dataclass(eq=False)
class _Connection:
    sock: socket.socket
    pid: int
    since_s: float
    worker: Worker | None = None
    received: LineBuffer = field(default_factory=LineBuffer)
    unsent: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class _Process:
    """A worker's process, watched until it ends; connections may come and go."""

    pidfd: int
    worker: Worker
    bye: Bye | None = None


class LinkServer:
    """Made by the agent; owned by whoever calls ``close``.

    All callbacks run on the thread ``elastic-link``.
    """

    def __init__(
        self,
        *,
        on_message: Callable[[Worker, Message], None],
        on_death: Callable[[Worker, WorkerDeath], None],
        on_error: Callable[[BaseException], None],
        node_id: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._on_message = on_message
        self._on_death = on_death
        self._on_error = on_error
        self._node_id = node_id
        self._clock = clock
        self._folder = _fresh_folder()
        self.path = os.path.join(self._folder, "link")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._is_listening = False
        self._selector = selectors.DefaultSelector()
        self._waker, self._wakee = socket.socketpair()
        for sock in (self._listener, self._waker, self._wakee):
            sock.setblocking(False)  # so that send() may be called before start()
        self._lock = threading.Lock()
        self._to_send: list[tuple[bytes, Worker | None]] = []
        self._connections: set[_Connection] = set()
        self._processes: dict[int, _Process] = {}
        self._present: tuple[Worker, ...] = ()
        self._tokens = itertools.count(1)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="elastic-link", daemon=True)

    def start(self) -> None:
        """Listen."""
        self._thread.start()

    def close(self) -> None:
        """Stop, join, remove the socket. Idempotent."""
        self._closing = True
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        elif not self._thread.ident:
            self._release()

    def send(self, message: Message, worker: Worker | None = None) -> None:
        """To one worker, or to all that have said hello. From any thread; never blocks."""
        line = encode(message)
        if self._closing:
            return
        with self._lock:
            self._to_send.append((line, worker))
        self._wake()

    def workers(self) -> tuple[Worker, ...]:
        """Those that have said hello and live."""
        return self._present

    # -- the thread ---------------------------------------------------------------------------

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"x")

    def _run(self) -> None:
        try:
            self._selector.register(self._wakee, selectors.EVENT_READ)
            while not self._closing:
                self._listen()
                for key, events in self._selector.select(timeout=HELLO_WITHIN_S / 2):
                    if not self._closing:
                        self._turn(key, events)
                self._drop_silent()
        except BaseException as error:
            get_logger().exception("the link's thread died")
            self._on_error(error)
            raise
        finally:
            self._closing = True
            self._release()

    def _release(self) -> None:
        for process in self._processes.values():
            os.close(process.pidfd)
        for connection in self._connections:
            connection.sock.close()
        self._processes.clear()
        self._connections.clear()
        for sock in (self._listener, self._waker, self._wakee):
            sock.close()
        self._selector.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _turn(self, key: selectors.SelectorKey, events: int) -> None:
        match key.data:
            case _Connection() as connection:
                if connection in self._connections and events & selectors.EVENT_WRITE:
                    self._flush(connection)
                if connection in self._connections and events & selectors.EVENT_READ:
                    self._read(connection)
            case _Process() as process:
                if self._processes.get(process.worker.pid) is process:
                    self._reap(process)
            case _ if key.fileobj is self._listener:
                self._accept()
            case _:
                self._wakee.recv(4096)
                self._send_queued()

    # -- what comes ---------------------------------------------------------------------------

    def _listen(self) -> None:
        if not self._is_listening:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._is_listening = True

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor is free: do not ask in a circle
            get_logger().warning("link: cannot accept a connection: %s", error)
            self._selector.unregister(self._listener)
            self._is_listening = False
            return
        peer = peer_of(sock)
        if why := self._refusal(peer):
            get_logger().warning("link: refused pid %d of user %d: %s", peer.pid, peer.uid, why)
            sock.close()
            return
        sock.setblocking(False)
        connection = _Connection(sock, peer.pid, self._clock.monotonic())
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _refusal(self, peer: Peer) -> str:
        if peer.uid != os.geteuid():
            return "another user"
        if not peer.pid:
            return "in a pid namespace that this agent does not see, so that it cannot watch it"
        if len(self._connections) >= MAX_CONNECTIONS:
            return f"there are {MAX_CONNECTIONS} connections already"
        return ""

    def _read(self, connection: _Connection) -> bool:
        """Read once; whether there may be more."""
        try:
            chunk = connection.sock.recv(1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            chunk = b""
        if not chunk:
            self._drop(connection)
            return False
        try:
            for line in connection.received.feed(chunk):
                self._handle(connection, decode(line))
        except LinkError as error:
            self._drop(connection, str(error))
        return connection in self._connections

    def _read_rest(self, connection: _Connection) -> None:
        for _ in range(_READS_AT_THE_END):
            if not self._read(connection):
                return

    def _handle(self, connection: _Connection, message: Message) -> None:
        if isinstance(message, Hello):
            self._greet(connection, message)
            return
        if connection.worker is None:
            raise LinkError(f"{type(message).__name__} before Hello")
        if not isinstance(message, FROM_WORKER):
            raise LinkError(f"{type(message).__name__} is said by agents only")
        process = self._processes.get(connection.pid)
        if isinstance(message, Bye) and process is not None:
            process.bye = message
        self._on_message(connection.worker, message)

    def _greet(self, connection: _Connection, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise LinkError(
                f"the worker speaks version {hello.version} of the link (torch-elastic-harness "
                f"{hello.library}), this agent {PROTOCOL_VERSION}",
                hint="use the same torch-elastic-harness in the worker's and the agent's Python",
            )
        if connection.worker is not None:
            raise LinkError("a second Hello on one connection")
        if not calls_itself(connection.pid, hello.pid):
            raise LinkError(f"pid {connection.pid} says that it is pid {hello.pid}")
        self._refuse_second(connection.pid, hello.local_rank)
        for other in [c for c in self._connections if c.pid == connection.pid]:
            if other is not connection:  # it has connected again
                self._read_rest(other)
                self._drop(other)
        connection.worker = Worker(connection.pid, hello.local_rank, next(self._tokens))
        self._watch(connection.worker)
        self._note_present()
        self._queue(connection, encode(Welcome(version=PROTOCOL_VERSION, node_id=self._node_id)))
        self._on_message(connection.worker, hello)

    def _refuse_second(self, pid: int, local_rank: int) -> None:
        for process in list(self._processes.values()):
            other = process.worker
            if other.local_rank != local_rank or other.pid == pid:
                continue
            if not has_ended(process.pidfd):
                raise LinkError(
                    f"pid {pid} says that it is local rank {local_rank}, which is pid {other.pid}"
                )
            self._reap(process)  # its successor was faster than the news of its death

    def _watch(self, worker: Worker) -> None:
        known = self._processes.get(worker.pid)
        if known is not None:
            known.worker, known.bye = worker, None
            return
        try:
            pidfd = os.pidfd_open(worker.pid)
        except OSError as error:
            raise LinkError(f"pid {worker.pid} cannot be watched: {error}") from None
        process = _Process(pidfd, worker)
        self._processes[worker.pid] = process
        self._selector.register(pidfd, selectors.EVENT_READ, process)

    # -- what ends, and what is sent ----------------------------------------------------------

    def _reap(self, process: _Process) -> None:
        self._selector.unregister(process.pidfd)
        exit_code, ended_by = how_it_ended(process.pidfd)
        pid = process.worker.pid
        # What it said last may still be unread.
        for connection in [c for c in self._connections if c.pid == pid]:
            self._read_rest(connection)
            self._drop(connection)
        del self._processes[pid]
        os.close(process.pidfd)
        self._note_present()
        self._on_death(process.worker, WorkerDeath(pid, exit_code, ended_by, process.bye))

    def _note_present(self) -> None:
        self._present = tuple(p.worker for p in self._processes.values())

    def _send_queued(self) -> None:
        with self._lock:
            queued, self._to_send = self._to_send, []
        for line, worker in queued:
            for connection in list(self._connections):
                told = connection.worker
                if told is not None and (worker is None or worker.pid == told.pid):
                    self._queue(connection, line)

    def _queue(self, connection: _Connection, line: bytes) -> None:
        if len(connection.unsent) + len(line) > MAX_UNSENT_BYTES:
            self._drop(connection, f"more than {MAX_UNSENT_BYTES} bytes unread by the worker")
            return
        connection.unsent += line
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        try:
            sent = connection.sock.send(connection.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(connection)
            return
        del connection.unsent[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.sock, wanted, connection)

    def _drop(self, connection: _Connection, why: str = "") -> None:
        if connection not in self._connections:
            return
        if why:
            get_logger().warning("link: pid %d is disconnected: %s", connection.pid, why)
        self._connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()

    def _drop_silent(self) -> None:
        now = self._clock.monotonic()
        for connection in list(self._connections):
            if connection.worker is None and now - connection.since_s > HELLO_WITHIN_S:
                self._drop(connection, f"no hello within {HELLO_WITHIN_S:g} s")


def _fresh_folder() -> str:
    """For this user alone (mode 0700)."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > LONGEST_TEMP_FOLDER:
        base = "/tmp"
    return tempfile.mkdtemp(prefix="elastic-", dir=base)
