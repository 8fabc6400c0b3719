"""Serves the parts in this node's memory to the other nodes of the job, and stores their replicas.

Owned by a process that outlives the workers. Client and server first prove to each other that they
hold the job's key (:mod:`elastic.secure_channel`); then the connection gets a thread. Requests and
responses are JSON objects of at most ``MAX_REQUEST`` and ``MAX_RESPONSE`` bytes, followed by raw
bytes if their fields announce them. Only paths of :mod:`checkpoints.format.names` are accepted.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import xxhash

from checkpoints.format.checksummed_json import MAX_DOCUMENT_BYTES
from checkpoints.format.names import (
    MANIFEST,
    CheckpointName,
    parse_attempt,
    parse_committed,
    parse_part_file,
    parse_writer_file,
)
from checkpoints.intervals import PEER_EXCHANGE_S, PEER_IDLE_S
from checkpoints.memory.node_memory import NodeMemory
from checkpoints.policies.retention import LatestN, RetentionFunction
from checkpoints.storage.protocol import ReadableFile
from elastic.secure_channel.acceptor import listen
from elastic.secure_channel.channel import Channel
from elastic.secure_channel.connection import Connection, Handler
from elastic.secure_channel.errors import ProtocolError
from elastic.secure_channel.handshake import Credentials
from elastic.secure_channel.hub import Hub
from elastic.secure_channel.limits import Limits, Report

MAX_REQUEST = 16 << 10
MAX_RESPONSE = 4 << 20
BLOCK_BYTES = 1 << 20
LIMITS = Limits(frame_bytes=MAX_REQUEST, open_connections=128)
_MAX_COUNT = 1 << 40
_FIELDS = {
    "list": {"do", "path"},
    "stat": {"do", "path"},
    "read": {"do", "path", "begin", "count"},
    "put": {"do", "path", "size"},
}


class PeerServer(Handler):
    """A hub that listens and one thread for each peer, all joined by :meth:`close`.

    Serves ``own`` and ``copies``. Peers write replicas into ``copies``, where parts that ``keep``
    does not retain are removed. ``identity`` is proved to the peers. ``report`` is called,
    rate-limited, for rejected connections; ``on_error`` for an unexpected error that ends a thread.
    """

    def __init__(
        self,
        own: NodeMemory,
        copies: NodeMemory,
        *,
        credentials: Credentials,
        host: str = "",
        keep: RetentionFunction = LatestN(3),  # noqa: B008  frozen
        limits: Limits = LIMITS,
        report: Report = lambda line: None,
        on_error: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        self._own, self._copies = own, copies
        self._keep = keep
        self._limits = limits
        self._on_error = on_error
        self._lock = threading.Lock()
        self._threads: dict[Channel, threading.Thread] = {}
        self._ended: set[Channel] = set()
        listener = listen(host, backlog=512)
        self._port = int(listener.getsockname()[1])
        self._hub = Hub(
            "checkpoint-peer-server",
            listener,
            self,
            credentials=credentials,
            limits=limits,
            report=report,
            on_error=on_error,
        )
        self._hub.start()

    @property
    def port(self) -> int:
        return self._port

    def close(self) -> None:
        """Close all connections and join all threads."""
        self._hub.close()
        with self._lock:
            for channel in self._threads.keys() - self._ended:
                channel.cut()
        for thread in self._threads.values():
            thread.join()

    # --- threads

    def opened(self, connection: Connection) -> None:
        """Called by the hub for an authenticated peer, which gets a thread."""
        with self._lock:
            ended, self._ended = self._ended, set()
        for closed in ended:
            self._threads.pop(closed).join()
        if len(self._threads) >= self._limits.open_connections:
            raise ProtocolError(f"there are {len(self._threads)} connections already")
        sock, received = self._hub.detach(connection)
        try:
            channel = Channel(sock, timeout_s=PEER_EXCHANGE_S, received=received)
            thread = threading.Thread(
                target=self._serve, args=(channel,), name="checkpoint-peer-connection", daemon=True
            )
            thread.start()
        except (OSError, RuntimeError):  # disconnected, or no thread could be started
            sock.close()
        else:
            self._threads[channel] = thread

    def _serve(self, channel: Channel) -> None:
        try:
            channel.wait(PEER_IDLE_S)
            while (request := channel.receive(MAX_REQUEST)) is not None:
                channel.expect(0)
                self._answer(channel, request)
                channel.wait(PEER_IDLE_S)
        except OSError:
            pass  # disconnected or too slow: the peer reports it
        except BaseException as error:  # noqa: BLE001  reported to the owner
            self._on_error(error)
        finally:
            with self._lock:
                self._ended.add(channel)
                channel.close()

    # --- requests

    def _answer(self, channel: Channel, request: dict[str, Any]) -> None:
        try:
            kind, path = request.get("do"), request.get("path")
            if not isinstance(path, str) or not _is_checkpoint_path(path):
                raise OSError(errno.EINVAL, "invalid path")
            if not isinstance(kind, str) or request.keys() != _FIELDS.get(kind):
                raise OSError(errno.EINVAL, "unknown request")
            if kind == "list":
                channel.send({"names": self._names(path)})
            elif kind == "stat":
                channel.send(self._stat(path))
            elif kind == "read":
                self._send(channel, path, request)
            elif kind == "put":
                self._put(channel, path, request)
            else:
                raise OSError(errno.EINVAL, "unknown request")
        except (ProtocolError, TimeoutError, ConnectionError):
            raise
        except OSError as error:
            channel.send({"errno": error.errno or errno.EIO, "error": error.strerror or str(error)})

    @property
    def _both(self) -> Sequence[NodeMemory]:
        return (self._own, self._copies)

    def _names(self, path: str) -> list[str]:
        found: set[str] = set()
        missing = 0
        for storage in self._both:
            try:
                names = storage.list(path)
                found.update(name for name in names if _is_checkpoint_path(_join(path, name)))
            except FileNotFoundError:
                missing += 1
        if path and missing == len(self._both):
            raise FileNotFoundError(errno.ENOENT, "no such folder")
        return sorted(found)

    def _stat(self, path: str) -> dict[str, Any]:
        for storage in self._both:
            with contextlib.suppress(FileNotFoundError):
                return {"size": storage.size(path), "modified_s": storage.modified_s(path)}
        raise FileNotFoundError(errno.ENOENT, "no such file")

    def _open_file(self, path: str) -> ReadableFile:
        with contextlib.suppress(FileNotFoundError):
            return self._own.open(path)
        return self._copies.open(path)

    def _send(self, channel: Channel, path: str, request: dict[str, Any]) -> None:
        begin, count = _number(request, "begin"), _number(request, "count")
        with contextlib.closing(self._open_file(path)) as source:
            count = max(0, min(count, source.size() - begin))
            channel.expect(count)
            channel.send({"count": count})
            with _abort_on_failure():
                self._stream(channel, source, begin, count)

    def _stream(self, channel: Channel, source: ReadableFile, begin: int, count: int) -> None:
        block = memoryview(bytearray(min(count, BLOCK_BYTES)))
        while count:
            piece = block[: min(count, BLOCK_BYTES)]
            if source.read_at(begin, piece) != len(piece):
                raise OSError(errno.EIO, "the file was truncated")
            channel.send_bytes(piece)
            begin, count = begin + len(piece), count - len(piece)

    def _put(self, channel: Channel, path: str, request: dict[str, Any]) -> None:
        """Confirm that there is space, receive the bytes, and publish them once their hash
        matches."""
        size = _number(request, "size")
        folder, _, file = path.partition("/")
        name = parse_attempt(folder)
        is_part = parse_part_file(file) is not None
        if name is None or file in ("", MANIFEST) or (is_part and size > MAX_DOCUMENT_BYTES):
            raise OSError(errno.EINVAL, "only parts of attempts are accepted")
        self._copies.make_room(name, size)
        left, bound = self._copies.room()
        if size > left:
            raise OSError(errno.ENOSPC, f"{bound} allows {max(left, 0)} of {size} bytes")
        self._copies.make_folder(folder)
        private = f"{folder}/.{file}.{secrets.token_hex(4)}"
        try:
            self._receive(channel, private, size)
            self._copies.rename(private, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._copies.remove(private)
            raise
        notes = self._copies.part_written(name, self._keep) if is_part else ()
        channel.send({"notes": list(notes)})

    def _receive(self, channel: Channel, private: str, size: int) -> None:
        sink = self._copies.create(private)
        try:
            channel.expect(size)
            channel.send({"go": True})
            hasher, block = xxhash.xxh3_128(), memoryview(bytearray(min(size, BLOCK_BYTES)))
            with _abort_on_failure():
                while size:
                    piece = block[: min(size, BLOCK_BYTES)]
                    channel.fill(piece)
                    hasher.update(piece)
                    sink.write(piece)
                    size -= len(piece)
            trailer = bytearray(16)
            channel.fill(memoryview(trailer))
            if bytes(trailer) != hasher.digest():
                raise OSError(errno.EBADMSG, "checksum mismatch in transit")
            sink.sync()
        finally:
            sink.close()


@contextlib.contextmanager
def _abort_on_failure() -> Iterator[None]:
    """A failure within raw bytes cannot be reported to the peer, so it ends the connection."""
    try:
        yield
    except OSError as error:
        raise ConnectionAbortedError(f"in the middle of a file: {error}") from error


def _is_checkpoint_path(path: str) -> bool:
    """Whether it is the root, a checkpoint's folder, or a writer's file in one."""
    if not path:
        return True
    folder, slash, file = path.partition("/")
    name: CheckpointName | None = parse_attempt(folder) or parse_committed(folder)
    if name is None:
        return False
    if not slash or file == MANIFEST:  # no manifest exists here, but a request for one is valid
        return True
    return parse_writer_file(file) is not None or parse_part_file(file) is not None


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _number(request: dict[str, Any], key: str) -> int:
    value = request.get(key)
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise OSError(errno.EINVAL, f"{key} is not a number of bytes")
    return value
