"""Checkpoints in the memory of nodes, and their copies on other nodes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import xxhash

from checkpoints.intervals import (
    PEER_EXCHANGE_S,
    PEER_IDLE_S,
    PEER_REQUEST_S,
    REPLICATION_FIRST_BACKOFF_S,
    REPLICATION_MAX_BACKOFF_S,
    REPLICATION_POLL_S,
    UNUSED_MEMORY_POLL_S,
)
from checkpoints.manifest import MAX_DOCUMENT_BYTES
from checkpoints.names import (
    MANIFEST,
    CheckpointName,
    parse_attempt,
    parse_committed,
    parse_part_file,
    parse_writer_file,
    part_file,
    writer_file,
)
from checkpoints.objects import Root
from checkpoints.policies import LatestN, RetentionFunction, to_remove
from checkpoints.storage import LocalStorage, ReadableFile, WritableFile, reason_of
from elastic.wire import base
from elastic.wire.base import Limits, ProtocolError, Report
from elastic.wire.channel import Channel
from elastic.wire.handshake import Credentials, SecretKey
from elastic.wire.hub import Connection, Handler, Hub, listen
from elastic.wire.tls import Tls, TlsFiles

# ----------------------------------------------------------------------------
# A tier in the memory of this node, which outlives the processes that write into it.
#
# It is a folder on a tmpfs such as ``/dev/shm``, created by a process that outlives the writers
# (an agent, a launcher)::
#
#     <folder>/own/       parts written by this node's ranks
#     <folder>/copies/    replicas of another node's parts, written by its agent
#     <folder>/node.json  addresses of the other nodes' memory; written by the agent
#
# No node holds all parts, so nothing is ever committed here:
# :class:`~checkpoints.tiers.TieredStorage` finds the complete checkpoints. Memory
# is bounded. A tmpfs accepts writes until the kernel kills a process, so every write first checks
# how many bytes the folder's limit, the tmpfs, the machine and the cgroup still allow.

OWN = "own"
COPIES = "copies"
# Reserved for other processes, regardless of the limit.
RESERVE_BYTES = 256 << 20
_RECHECK_BYTES = 64 << 20


class NodeMemory(LocalStorage):
    """A storage of parts in memory; nothing is committed in it.

    The ``keep`` of a save decides which parts to retain: use at least the three newest, since ranks
    write independently and a checkpoint needs the parts of all ranks. ``room`` returns how many
    bytes may be added, and what limits them.
    """

    is_volatile = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        limit_bytes: int | None = None,
        room: Callable[[Path, int | None], tuple[int, str]] | None = None,
    ) -> None:
        super().__init__(folder)
        self._folder = Path(folder)
        self._limit_bytes = limit_bytes
        self._room = room or available_bytes_in

    def create(self, path: str) -> WritableFile:
        return _BoundedSink(super().create(path), self.room)

    def room(self) -> tuple[int, str]:
        """How many bytes may be added, and what limits them."""
        return self._room(self._folder, self._limit_bytes)

    def names(self) -> list[CheckpointName]:
        """The checkpoints that have complete parts here, newest first."""
        complete = [name for name in self._attempts() if self._has_part(name)]
        return sorted(complete, key=lambda name: name.age_order, reverse=True)

    def make_room(self, name: CheckpointName, size_bytes: int) -> None:
        """Remove older parts, oldest first, until ``size_bytes`` more fit; none if they never fit.

        The newest older part is spared, unless the limit leaves no room for a second one: after a
        shrink of the world, the memory would otherwise stay full of parts that nothing completes.
        """
        older = sorted(
            (other for other in self._attempts() if other.age_order < name.age_order),
            key=lambda other: other.age_order,
        )
        sizes = {other: used_bytes(self._folder / other.attempt) for other in older}
        if self._limit_bytes is None or size_bytes + sum(sizes.values()) <= self._limit_bytes:
            older = older[:-1]
        left_bytes, _ = self.room()
        if left_bytes + sum(sizes[other] for other in older) < size_bytes:
            return
        for other in older:
            if self.room()[0] >= size_bytes:
                return
            self.remove_folder(other.attempt)

    def remove_if_empty(self, name: CheckpointName) -> None:
        """Remove the folder of a checkpoint, unless it has files."""
        with contextlib.suppress(OSError):
            os.rmdir(self._folder / name.attempt)

    def _attempts(self) -> list[CheckpointName]:
        with contextlib.suppress(FileNotFoundError):
            return [name for name in map(parse_attempt, self.list("")) if name is not None]
        return []

    def _has_part(self, name: CheckpointName) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return any(parse_part_file(file) is not None for file in self.list(name.attempt))
        return False

    def part_written(self, name: CheckpointName, keep: RetentionFunction | None) -> tuple[str, ...]:
        """Remove the parts that ``keep`` does not retain; returns notes."""
        try:
            kept = self.names()
            for old in to_remove(kept, keep) if keep is not None else ():
                if old != name:
                    self.remove_folder(old.attempt)
                    kept.remove(old)
            oldest = kept[-1].age_order if kept else name.age_order
            for other in self._attempts():  # the rest of failed writes
                if other.age_order < oldest:
                    self.remove_folder(other.attempt)
        except OSError as error:
            return (f"{name} is stored, but removing older parts failed: {reason_of(error)}",)
        except Exception as error:  # noqa: BLE001  of the user's policy
            return (f"{name} is stored, but removing older parts failed: {error!r}",)
        return ()


class _BoundedSink:
    """Raises ENOSPC before the memory that other processes need is used up."""

    def __init__(self, inner: WritableFile, room: Callable[[], tuple[int, str]]) -> None:
        self._inner = inner
        self._room = room
        self._allowed = 0

    def write(self, data: bytes | memoryview) -> None:
        size = memoryview(data).nbytes
        if size > self._allowed:
            left, bound = self._room()
            if size > left:
                raise OSError(errno.ENOSPC, f"{bound} allows {max(left, 0)} of {size} bytes")
            self._allowed = min(left, max(size, _RECHECK_BYTES))
        self._allowed -= size
        self._inner.write(data)

    def sync(self) -> None:
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()


def available_bytes_in(folder: Path, limit_bytes: int | None) -> tuple[int, str]:
    """Bytes that may be added to a folder in memory, and what limits them."""
    bounds = [
        (_free(folder), f"the file system of {folder}"),
        (_available() - RESERVE_BYTES, f"the machine's memory, less {RESERVE_BYTES >> 20} MiB,"),
        (_cgroup_left() - RESERVE_BYTES, f"the cgroup's memory, less {RESERVE_BYTES >> 20} MiB,"),
    ]
    if limit_bytes is not None:
        bounds.append((limit_bytes - used_bytes(folder), f"the limit of {limit_bytes} bytes"))
    return min(bounds)


def used_bytes(folder: Path) -> int:
    """The size of all files below a folder; tolerates files that are removed concurrently."""
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(root, file)).st_size
    return total


_UNBOUNDED = 1 << 62


def _free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _available() -> int:
    """MemAvailable of /proc/meminfo: memory available without swapping."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", "rb") as lines:
        for line in lines:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) << 10
    return _UNBOUNDED


def _cgroup_left(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that the limits of this process's cgroup still allow; tmpfs pages count towards them.

    The page cache of files is reclaimable; pages of a tmpfs are not.
    """
    left = [_left_in(folder, "memory.max", "memory.current") for folder in _cgroups(root)]
    version_1 = _left_in(root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min([*left, version_1])


def _cgroups(root: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                own = Path(line[3:].strip("/"))
                return [root / own, *(root / parent for parent in own.parents)]
    return [root]


def _left_in(folder: Path, limit_file: str, usage_file: str) -> int:
    try:
        limit, used = ((folder / name).read_text().strip() for name in (limit_file, usage_file))
        if limit == "max":
            return _UNBOUNDED
        return int(limit) - int(used) + _reclaimable(folder / "memory.stat")
    except (OSError, ValueError):
        return _UNBOUNDED


def _reclaimable(statistics: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split() for line in statistics.read_text().splitlines())
        return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
    return 0


# ----------------------------------------------------------------------------
# Serves the parts in this node's memory to the other nodes of the job, and stores their replicas.
#
# Owned by a process that outlives the workers. Client and server first prove to each other that
# they hold the job's key (:mod:`elastic.wire`); then the connection gets a thread.
# Requests and responses are JSON objects of at most ``MAX_REQUEST`` and ``MAX_RESPONSE`` bytes,
# followed by raw bytes if their fields announce them. Only paths of
# :mod:`checkpoints.names` are accepted.

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


# ----------------------------------------------------------------------------
# The memory of another node, as a storage: parts are read from it, replicas are put into it.
#
# The other end is the server above. A peer that is slow, unreachable or
# full raises ``OSError``; callers continue without it.

T = TypeVar("T")

_MAX_IDLE = 8


@dataclass(frozen=True)
class PeerAddress:
    """The address of a node's memory server, and the identity that it must prove."""

    node: str  # for messages
    host: str
    port: int
    identity: str  # proved with the job's key, since ports are reused


class PeerStorage:
    """A read-only storage with :meth:`put`. Safe for concurrent use; its owner closes it once."""

    is_volatile = True

    def __init__(
        self,
        address: PeerAddress,
        *,
        key: Callable[[], SecretKey],
        tls: Tls | None = None,
        timeout_s: float = PEER_REQUEST_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._key = key
        self._tls = tls
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._idle: list[Channel] = []
        self._busy: set[Channel] = set()
        self._closed = False

    @property
    def place(self) -> str:
        at = self._address
        return f"the memory of {at.node} ({at.host}:{at.port})"

    def list(self, path: str) -> list[str]:
        names = self._request("list", path).get("names")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ProtocolError(errno.EPROTO, f"{self.place} sent an invalid response")
        return names

    def size(self, path: str) -> int:
        return int(self._number(self._request("stat", path), "size"))

    def modified_s(self, path: str) -> float:
        return self._number(self._request("stat", path), "modified_s")

    def open(self, path: str) -> ReadableFile:
        return _PeerSource(self, path, self.size(path))

    def read(self, path: str, begin: int, into: memoryview) -> int:
        """Fill ``into``. Returns the number of bytes, fewer only at end of file."""

        def exchange(channel: Channel) -> int:
            channel.expect(len(into))
            answer = self._exchange(channel, "read", path, begin=begin, count=len(into))
            count = int(self._number(answer, "count"))
            if count > len(into):
                raise ProtocolError(errno.EPROTO, f"{self.place} sent more than was requested")
            channel.fill(into[:count])
            return count

        return self._with_channel(exchange)

    def put(self, path: str, source: ReadableFile) -> None:
        """Copy a file to the peer, where it becomes visible once its hash is verified."""
        size = source.size()

        def exchange(channel: Channel) -> None:
            self._exchange(channel, "put", path, size=size)  # raises if there is no space
            channel.expect(size)
            hasher, block = xxhash.xxh3_128(), memoryview(bytearray(min(size, BLOCK_BYTES)))
            for begin in range(0, size, BLOCK_BYTES):
                piece = block[: min(size - begin, BLOCK_BYTES)]
                if source.read_at(begin, piece) != len(piece):
                    raise OSError(errno.EIO, "the file was truncated", path)
                hasher.update(piece)
                channel.send_bytes(piece)
            channel.send_bytes(hasher.digest())
            self._answer(channel)

        self._with_channel(exchange)

    def close(self) -> None:
        """Close all connections; operations in progress raise ``OSError``."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for channel in self._busy:
                channel.cut()
        for channel in idle:
            channel.close()

    # --- exchanges

    def _request(self, kind: str, path: str) -> dict[str, Any]:
        return self._with_channel(lambda channel: self._exchange(channel, kind, path))

    def _exchange(self, channel: Channel, kind: str, path: str, **more: int) -> dict[str, Any]:
        channel.send({"do": kind, "path": path, **more})
        return self._answer(channel)

    def _answer(self, channel: Channel) -> dict[str, Any]:
        answer = channel.receive(MAX_RESPONSE)
        if answer is None:
            raise ConnectionResetError(errno.ECONNRESET, f"{self.place} closed the connection")
        if "error" in answer:
            number = answer.get("errno")
            raise _Refused(number if type(number) is int else errno.EIO, str(answer["error"])[:500])
        return answer

    def _with_channel(self, exchange: Callable[[Channel], T]) -> T:
        """Run ``exchange`` over an idle connection if there is one, else over a new one.

        The server closes idle connections after a while, so only a new one's failure counts.
        """
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        if idle is not None:
            with contextlib.suppress(ConnectionError):
                return self._run(idle, exchange)
        return self._run(self._connect(), exchange)

    def _run(self, channel: Channel, exchange: Callable[[Channel], T]) -> T:
        channel.expect(0)
        try:
            self._take(channel)
            result = exchange(channel)
        except _Refused as refused:
            self._give_back(channel)
            raise OSError(refused.errno, refused.strerror) from None
        except BaseException:
            self._drop(channel)
            raise
        self._give_back(channel)
        return result

    def _take(self, channel: Channel) -> None:
        """Register a channel, so that :meth:`close` interrupts it."""
        with self._lock:
            if self._closed:
                raise OSError(errno.ESHUTDOWN, f"the connection to {self.place} was closed")
            self._busy.add(channel)

    def _drop(self, channel: Channel) -> None:
        with self._lock:
            self._busy.discard(channel)
        channel.close()

    def _give_back(self, channel: Channel) -> None:
        with self._lock:
            self._busy.discard(channel)
            if len(self._idle) < _MAX_IDLE and not self._closed:
                self._idle.append(channel)
                return
        channel.close()

    def _connect(self) -> Channel:
        at = self._address
        connection = socket.create_connection((at.host, at.port), timeout=self._timeout_s)
        channel = Channel(
            connection, timeout_s=self._timeout_s, tls=self._tls, monotonic=self._monotonic
        )
        try:
            self._take(channel)
            channel.authenticate(self._key(), expected=at.identity)
        except BaseException:
            self._drop(channel)
            raise
        return channel

    def _number(self, answer: dict[str, Any], key: str) -> float:
        value = answer.get(key)
        if not isinstance(value, (int, float)) or not value >= 0:
            raise ProtocolError(errno.EPROTO, f"{self.place} sent an invalid response")
        return value

    # --- only the node itself changes its memory

    def make_folder(self, path: str) -> None:
        self._refuse(path)

    def create(self, path: str) -> WritableFile:
        self._refuse(path)

    def rename(self, old: str, new: str) -> None:
        self._refuse(old)

    def sync_folder(self, path: str) -> None:
        self._refuse(path)

    def remove(self, path: str) -> None:
        self._refuse(path)

    def remove_folder(self, path: str) -> None:
        self._refuse(path)

    def _refuse(self, path: str) -> NoReturn:
        raise OSError(errno.EROFS, "the memory of another node is read-only", path)


class _Refused(OSError):
    """An error response of the peer; the connection stays usable."""


class _PeerSource:
    def __init__(self, storage: PeerStorage, path: str, size: int) -> None:
        self._storage, self._path, self._size = storage, path, size

    def size(self) -> int:
        return self._size

    def read_at(self, offset: int, into: memoryview) -> int:
        return self._storage.read(self._path, offset, into)

    def mapped(self) -> None:
        return None

    def close(self) -> None:
        pass


# ----------------------------------------------------------------------------
# Replicates the newest parts of this node's memory to a peer, so that they survive this node.
#
# Runs on one thread of the process that owns the memory; workers never wait for a peer. The newest
# parts are replicated first, and superseded ones are skipped: a slow network means older replicas,
# not a growing queue. A failing peer is retried with exponential backoff.

# The newest checkpoint may lack the parts of other ranks; the one before it rarely does.
_NEWEST = 2


@dataclass(frozen=True, kw_only=True)
class ReplicationOutcome:
    """The outcome of replicating one part."""

    name: str
    rank: int
    peer: str  # a node
    size_bytes: int
    duration_s: float
    reason: str = ""  # why it failed; empty on success


class Replicator:
    """Copies parts to the node that ``peer`` returns before each copy; None pauses replication.

    ``on_outcome`` is called for every copy, ``on_error`` if the thread dies; both on its thread.
    """

    def __init__(
        self,
        own: NodeMemory,
        peer: Callable[[], PeerAddress | None],
        *,
        key: Callable[[], SecretKey],
        tls: Tls | None = None,
        on_outcome: Callable[[ReplicationOutcome], object] = lambda outcome: None,
        on_error: Callable[[BaseException], object] = lambda error: None,
        timeout_s: float = PEER_REQUEST_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = own
        self._peer = peer
        self._key = key
        self._tls = tls
        self._on_outcome = on_outcome
        self._on_error = on_error
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._done: set[tuple[CheckpointName, int]] = set()
        self._address: PeerAddress | None = None
        self._client: PeerStorage | None = None
        self._failures = 0
        self._not_before_s = 0.0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint-copier", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop and join the thread; a copy in flight is interrupted."""
        self._closing.set()
        client = self._client
        if client is not None:
            client.close()
        self._thread.join()

    def _run(self) -> None:
        is_used = False
        try:
            while not self._closing.wait(REPLICATION_POLL_S if is_used else UNUSED_MEMORY_POLL_S):
                is_used = bool(self._own.names())
                self._follow(self._peer())
                while self._may_copy() and self._copy_one():
                    pass
        except BaseException as error:  # noqa: BLE001  reported to the owner
            self._on_error(error)
        finally:
            self._follow(None)

    def _may_copy(self) -> bool:
        return not self._closing.is_set() and self._monotonic() >= self._not_before_s

    def _backoff_s(self) -> float:
        return min(
            REPLICATION_FIRST_BACKOFF_S * 2.0 ** min(self._failures - 1, 10),
            REPLICATION_MAX_BACKOFF_S,
        )

    def _follow(self, address: PeerAddress | None) -> None:
        """Switch to another peer, which holds no replicas yet."""
        if address == self._address:
            return
        if self._client is not None:
            self._client.close()
        self._address, self._failures, self._not_before_s = address, 0, 0.0
        self._client = (
            PeerStorage(
                address,
                key=self._key,
                tls=self._tls,
                timeout_s=self._timeout_s,
                monotonic=self._monotonic,
            )
            if address is not None
            else None
        )
        self._done.clear()

    def _copy_one(self) -> bool:
        """Replicate the newest missing part; False if there is none, or if it failed."""
        client = self._client
        if client is None or self._peer() != self._address:
            return False
        for name, rank, world_size in self._missing_parts():
            return self._copy(client, name, rank, world_size)
        return False

    def _missing_parts(self) -> Iterator[tuple[CheckpointName, int, int]]:
        names = self._own.names()[:_NEWEST]
        self._done = {(name, rank) for name, rank in self._done if name in names}
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # superseded and removed
                for ranks in map(parse_part_file, self._own.list(name.attempt)):
                    if ranks is not None and (name, ranks[0]) not in self._done:
                        yield name, *ranks

    def _copy(self, client: PeerStorage, name: CheckpointName, rank: int, world_size: int) -> bool:
        began_s = self._monotonic()
        size, reason = 0, ""
        try:
            # The part file last: it declares the other file complete.
            for file in (writer_file(rank, world_size), part_file(rank, world_size)):
                path = f"{name.attempt}/{file}"
                with contextlib.closing(self._own.open(path)) as source:
                    client.put(path, source)
                    size += source.size()
        except FileNotFoundError:
            self._done.add((name, rank))  # superseded and removed
            return True
        except OSError as error:
            reason = error.strerror or str(error) or type(error).__name__
        if reason:
            self._failures += 1
            self._not_before_s = self._monotonic() + self._backoff_s()
        else:
            self._failures = 0
            self._done.add((name, rank))
        if not self._closing.is_set():
            self._report(name, rank, size, began_s, reason)
        return not reason

    def _report(
        self, name: CheckpointName, rank: int, size: int, began_s: float, reason: str
    ) -> None:
        assert self._address is not None
        self._on_outcome(
            ReplicationOutcome(
                name=str(name),
                rank=rank,
                peer=self._address.node,
                size_bytes=size,
                duration_s=self._monotonic() - began_s,
                reason=reason,
            )
        )


# ----------------------------------------------------------------------------
# Hosts the memory tier of a node: the folder, the server for peers, and the replication.
#
# For a process that outlives the workers, such as an agent. Workers receive only the path of the
# folder. A file in it, readable by this user only and updated with the world, holds the addresses
# of the other nodes and the key to their memory (:func:`memory_roots`)::
#
#     host = MemoryHost(
#         folder,
#         host="10.0.0.7",
#         credentials=Credentials(key=job_key, identity="node-7"),
#         neighbours=lambda: Neighbours(others, next_one),
#     )
#     …
#     host.close()

NODE_FILE = "node.json"
KEEP: RetentionFunction = LatestN(3)  # the ranks may be two saves apart


@dataclass(frozen=True)
class Neighbours:
    """The other nodes of the current world, and which of them receives this node's replicas.

    ``further`` are the nodes after the successor, which receive any additional replicas.
    """

    peers: tuple[PeerAddress, ...] = ()
    successor: PeerAddress | None = None
    further: tuple[PeerAddress, ...] = ()

    def receiver(self, number: int) -> PeerAddress | None:
        """The node that receives replica ``number``, from 0; None if there is none."""
        if number == 0:
            return self.successor
        return self.further[number - 1] if number <= len(self.further) else None


def _unshared_credentials() -> Credentials:
    """Credentials with which no peer can connect."""
    key = SecretKey.generate()
    return Credentials(key=lambda: key)


class MemoryHost:
    """Creates ``folder`` (mode 0700); :meth:`close` removes it. Raises ``OSError``.

    ``limit_bytes`` limits this node's own parts, and the replicas of each other node. ``replicas``
    is the number of nodes that receive this node's parts; that many adjacent nodes may be lost at
    once. ``neighbours`` and the key of ``credentials`` are called periodically and by
    :meth:`refresh`. All hosts of a job share one key, and each has its own identity. Without
    credentials no peer can connect. TLS, if configured, protects all connections to and from other
    hosts, including those of this node's workers.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        host: str = "",
        credentials: Credentials | None = None,
        limit_bytes: int | None = None,
        replicas: int = 1,
        neighbours: Callable[[], Neighbours] = Neighbours,
        report: Report = lambda line: None,
        on_outcome: Callable[[ReplicationOutcome], object] = lambda outcome: None,
        on_error: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        self._folder = Path(folder)
        self._limit_bytes = limit_bytes
        self._neighbours = neighbours
        credentials = credentials or _unshared_credentials()
        self._key = credentials.key
        self._tls = credentials.tls
        self._known = Neighbours()
        self._known_key = self._key()
        self._lock = threading.Lock()
        self._folder.mkdir(mode=0o700)
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            own = NodeMemory(self._folder / OWN, limit_bytes=limit_bytes)
            most = limit_bytes * replicas if limit_bytes is not None else None
            copies = NodeMemory(self._folder / COPIES, limit_bytes=most)
            for memory in (own, copies):
                memory.make_folder("")
            self._write()
            self._server = PeerServer(
                own,
                copies,
                credentials=credentials,
                host=host,
                keep=KEEP,
                report=report,
                on_error=on_error,
            )
            undo.callback(self._server.close)
            self._replicators: list[Replicator] = []
            for number in range(replicas):
                replicator = Replicator(
                    own,
                    partial(self._receiver, number),
                    key=self._key,
                    tls=self._tls,
                    on_outcome=on_outcome,
                    on_error=on_error,
                )
                undo.callback(replicator.close)
                self._replicators.append(replicator)
            undo.pop_all()

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def port(self) -> int:
        return self._server.port

    def refresh(self) -> PeerAddress | None:
        """Refresh the neighbours and publish them to the workers; returns the first replication
        target."""
        return self._receiver(0)

    def _receiver(self, number: int) -> PeerAddress | None:
        with self._lock:
            neighbours, key = self._neighbours(), self._key()
            if (neighbours, key) != (self._known, self._known_key):
                self._known, self._known_key = neighbours, key
                self._write()
            return neighbours.receiver(number)

    def close(self) -> None:
        """Stop the server and the replication, join their threads and free the memory."""
        for replicator in self._replicators:
            replicator.close()
        self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self) -> None:
        peers = [asdict(peer) for peer in self._known.peers]
        content = {
            "limit_bytes": self._limit_bytes,
            "key": self._known_key.text,
            "tls": asdict(self._tls.files) if self._tls is not None else None,
            "peers": peers,
        }
        text = json.dumps(content)
        descriptor, name = tempfile.mkstemp(dir=self._folder)  # mode 0600: it holds the key
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            os.replace(name, self._folder / NODE_FILE)
        except BaseException:
            os.unlink(name)
            raise


def own_memory(folder: str | os.PathLike[str]) -> NodeMemory:
    """The storage to which this node's ranks write. Raises ``OSError`` if the folder has no
    host."""
    return NodeMemory(Path(folder) / OWN, limit_bytes=_read(folder).limit_bytes)


def memory_roots(
    folder: str | os.PathLike[str], *, timeout_s: float = PEER_REQUEST_S
) -> list[Root]:
    """For :class:`~checkpoints.TieredStorage`: this node's parts, the replicas it holds, then
    the memory of all other nodes.

    Raises ``OSError`` if the folder has no host.
    """
    content = _read(folder)
    tls = Tls(content.tls) if content.tls is not None else None
    return [
        NodeMemory(Path(folder) / OWN),
        NodeMemory(Path(folder) / COPIES),
        *(
            PeerStorage(peer, key=lambda: content.key, tls=tls, timeout_s=timeout_s)
            for peer in content.peers
        ),
    ]


@dataclass(frozen=True)
class _HostState:
    """The content of the host's file."""

    limit_bytes: int | None
    key: SecretKey
    tls: TlsFiles | None
    peers: tuple[PeerAddress, ...]


def _read(folder: str | os.PathLike[str]) -> _HostState:
    text = base.read(Path(folder) / NODE_FILE).decode()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        data = json.loads(text)
        names = [field.name for field in fields(PeerAddress)]
        peers = (PeerAddress(**{name: peer[name] for name in names}) for peer in data["peers"])
        tls = TlsFiles(**data["tls"]) if data["tls"] is not None else None
        return _HostState(data["limit_bytes"], SecretKey.parse(data["key"]), tls, tuple(peers))
    raise OSError(f"{folder}/{NODE_FILE} is not a valid memory host file")
