"""The agent's end of the link: one unix socket, one thread, and a pidfd for every worker.

A worker's pidfd reports its death within milliseconds. Its socket does not: forked data workers
inherit it and keep it open. A client is identified by SO_PEERCRED, not by its messages, and must
prove that it has the key, which is in the socket's folder and readable only by this user.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import LinkError
from elastic.link.handshake import key_path
from elastic.link.peer import Peer, exit_status, has_ended, may_claim_pid, peer_of
from elastic.link.protocol import (
    FROM_WORKER,
    MAX_MESSAGE,
    PROTOCOL_VERSION,
    ClientHandshakeReply,
    ClientHandshakeRequest,
    Exiting,
    Message,
    decode,
    encode,
)
from elastic.secure_channel import private_files
from elastic.secure_channel.acceptor import listen_on_path
from elastic.secure_channel.connection import Connection, Handler
from elastic.secure_channel.errors import ProtocolError
from elastic.secure_channel.handshake import Credentials
from elastic.secure_channel.hub import Hub
from elastic.secure_channel.keys import SecretKey
from elastic.secure_channel.limits import Limits
from elastic.telemetry.log import get_logger

LIMITS = Limits(
    frame_bytes=MAX_MESSAGE,
    unsent_bytes=1 << 20,
    open_connections=256,
    pending_connections=64,
    pending_per_address=16,
)
_BACKLOG = 512
LONGEST_TEMP_FOLDER = 60  # bytes: a unix socket's path has at most 107


@dataclass(frozen=True)
class Worker:
    """A worker that has completed the handshake."""

    pid: int
    local_rank: int
    token: int  # of this connection


@dataclass(frozen=True)
class WorkerDeath:
    """How a worker's process ended."""

    pid: int
    exit_code: int | None  # None: ended by a signal, or not a child of this process
    signal: int | None
    exit_notice: Exiting | None


@dataclass(eq=False)
class _Process:
    """A worker's process, watched until it ends; its connection may change."""

    pidfd: int
    worker: Worker
    exit_notice: Exiting | None = None


class LinkServer:
    """Created by the agent; its owner calls ``close``.

    All callbacks run on the thread ``elastic-link``. The link's key is generated here, for this
    agent and its workers only.
    """

    def __init__(
        self,
        *,
        on_message: Callable[[Worker, Message], None],
        on_death: Callable[[Worker, WorkerDeath], None],
        on_error: Callable[[BaseException], None],
        node_id: str = "",
        limits: Limits = LIMITS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._on_message = on_message
        self._on_death = on_death
        self._on_error = on_error
        self._node_id = node_id
        self._folder = _fresh_folder()
        self.path = os.path.join(self._folder, "link")
        self._key = key = SecretKey.generate()
        self._write_key()
        self._hub = Hub(
            "elastic-link",
            listen_on_path(self.path, backlog=_BACKLOG),
            _LinkHandler(self),
            credentials=Credentials(key=lambda: key, identity=node_id),
            limits=limits,
            report=get_logger().warning,
            on_error=self._died,
            monotonic=clock.monotonic,
        )
        self._processes: dict[int, _Process] = {}
        self._present: tuple[Worker, ...] = ()
        self._tokens = itertools.count(1)

    def start(self) -> None:
        """Listen."""
        self._hub.start()

    def keep_key(self) -> None:
        """Ensure that starting workers find the key and the socket: what a cleaner of the folder
        for temporary files has removed is created again. (After days, systemd-tmpfiles removes
        untouched files, but keeps live sockets; others remove everything.)

        Raises LinkError if that is impossible.
        """
        try:
            try:
                os.utime(key_path(self.path), follow_symlinks=False)
            except FileNotFoundError:
                private_files.make_folder_again(self._folder)
                self._write_key()
            if not os.path.exists(self.path):
                self._hub.listen_on(listen_on_path(self.path, backlog=_BACKLOG))
        except OSError as error:
            raise LinkError(
                f"the folder of the link to this node's workers cannot be restored: {error}",
                hint=f"exclude {self._folder} from the cleaning of temporary files, or set TMPDIR",
            ) from error

    def _write_key(self) -> None:
        private_files.write(key_path(self.path), self._key.text.encode())

    def close(self) -> None:
        """Stop, join, remove the socket. Idempotent."""
        self._hub.close()
        for process in self._processes.values():
            os.close(process.pidfd)
        self._processes.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, message: Message, worker: Worker | None = None) -> None:
        """Send to one worker, or to all connected ones. From any thread; never blocks."""
        payload = encode(message)
        if not self._hub.is_closing:
            self._hub.post(lambda: self._send_all(payload, worker))

    def workers(self) -> tuple[Worker, ...]:
        """The workers that are connected and alive."""
        return self._present

    # -- the thread ---------------------------------------------------------------------------

    def _died(self, error: BaseException) -> None:
        get_logger().error("the link's thread died", exc_info=error)
        self._on_error(error)

    def handle(self, connection: Connection, payload: bytes) -> None:
        """Process a worker's frame. Raises LinkError."""
        message = decode(payload)
        if isinstance(message, ClientHandshakeRequest):
            self._complete_handshake(connection, message)
            return
        worker = connection.data
        if not isinstance(worker, Worker):
            raise LinkError(f"{type(message).__name__} before ClientHandshakeRequest")
        if not isinstance(message, FROM_WORKER):
            raise LinkError(f"{type(message).__name__} is sent by agents only")
        process = self._processes.get(worker.pid)
        if isinstance(message, Exiting) and process is not None:
            process.exit_notice = message
        self._on_message(worker, message)

    def _complete_handshake(self, connection: Connection, request: ClientHandshakeRequest) -> None:
        if request.version != PROTOCOL_VERSION:
            raise LinkError(
                f"the worker speaks version {request.version} of the link (torch-elastic-harness "
                f"{request.library}), this agent {PROTOCOL_VERSION}",
                hint="use the same torch-elastic-harness in the worker's and the agent's Python",
            )
        if connection.data is not None:
            raise LinkError("a second ClientHandshakeRequest on one connection")
        pid = peer_of(connection.socket).pid
        if not may_claim_pid(pid, request.pid):
            raise LinkError(f"pid {pid} claims to be pid {request.pid}")
        self._refuse_duplicate_rank(pid, request.local_rank)
        for other in self._connections_of(pid):  # the worker has reconnected
            self._hub.drain(other)
            self._hub.drop(other)
        worker = Worker(pid, request.local_rank, next(self._tokens))
        connection.data = worker
        self._watch(worker)
        self._update_present()
        reply = ClientHandshakeReply(version=PROTOCOL_VERSION, node_id=self._node_id)
        self._hub.send(connection, encode(reply))
        self._on_message(worker, request)

    def _connections_of(self, pid: int) -> list[Connection]:
        return [
            connection
            for connection in self._hub.connections
            if isinstance(connection.data, Worker) and connection.data.pid == pid
        ]

    def _refuse_duplicate_rank(self, pid: int, local_rank: int) -> None:
        for process in list(self._processes.values()):
            other = process.worker
            if other.local_rank != local_rank or other.pid == pid:
                continue
            if not has_ended(process.pidfd):
                raise LinkError(
                    f"pid {pid} claims to be local rank {local_rank}, which is pid {other.pid}"
                )
            self._reap(process)  # its successor connected before its death was reported

    def _watch(self, worker: Worker) -> None:
        known = self._processes.get(worker.pid)
        if known is not None:
            known.worker, known.exit_notice = worker, None
            return
        try:
            pidfd = os.pidfd_open(worker.pid)
        except OSError as error:
            raise LinkError(f"pid {worker.pid} cannot be watched: {error}") from None
        process = _Process(pidfd, worker)
        self._processes[worker.pid] = process
        self._hub.watch(pidfd, lambda: self._reap(process))

    # -- deaths and outgoing messages ---------------------------------------------------------

    def _reap(self, process: _Process) -> None:
        pid = process.worker.pid
        if self._processes.get(pid) is not process:
            return
        self._hub.unwatch(process.pidfd)
        exit_code, signum = exit_status(process.pidfd)
        # Its last messages may still be unread.
        for connection in self._connections_of(pid):
            self._hub.drain(connection)
            self._hub.drop(connection)
        del self._processes[pid]
        os.close(process.pidfd)
        self._update_present()
        self._on_death(process.worker, WorkerDeath(pid, exit_code, signum, process.exit_notice))

    def _update_present(self) -> None:
        self._present = tuple(p.worker for p in self._processes.values())

    def _send_all(self, payload: bytes, to: Worker | None) -> None:
        for connection in self._hub.connections:
            worker = connection.data
            if isinstance(worker, Worker) and (to is None or to.pid == worker.pid):
                self._hub.send(connection, payload)


class _LinkHandler(Handler):
    """Adapts the hub, which handles connections, to the server, which handles workers."""

    def __init__(self, server: LinkServer) -> None:
        self._server = server

    def admit(self, sock: socket.socket) -> str:
        peer = peer_of(sock)
        if why := _refusal(peer):
            raise ProtocolError(f"pid {peer.pid} of user {peer.uid}: {why}")
        return f"pid {peer.pid}"

    def received(self, connection: Connection, payload: bytes) -> None:
        try:
            self._server.handle(connection, payload)
        except LinkError as error:
            raise ProtocolError(str(error)) from error


def _refusal(peer: Peer) -> str:
    if peer.uid != os.geteuid():
        return "it belongs to another user"
    if not peer.pid:
        return "it is in a pid namespace that is not visible to this agent, which cannot watch it"
    return ""


def _fresh_folder() -> str:
    """A new folder of mode 0700, accessible only to this user."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) > LONGEST_TEMP_FOLDER:
        base = "/tmp"
    return private_files.make_folder("elastic-", base=base)
