"""Serves the parts in this node's memory to the other nodes of the job, and takes copies of theirs.

Owned by a process that outlives the workers. Paths are only ever names of
:mod:`checkpoints.naming`; whatever else is asked for is refused.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import xxhash

from checkpoints.keep import Keep, LatestN
from checkpoints.naming import (
    MANIFEST,
    CheckpointName,
    parse_attempt,
    parse_committed,
    parse_part_file,
    parse_writer_file,
)
from checkpoints.node_memory import NodeMemory
from checkpoints.peer_wire import BLOCK_BYTES, MAX_REQUEST, Wire, WireError, prove_as_server
from checkpoints.sealed import MAX_SEALED_BYTES
from checkpoints.storage import Source

MAX_CONNECTIONS = 128
_PROOF_S = 5.0
_IDLE_S = 120.0
_EXCHANGE_S = 10.0
_AFTER_FAILURE_S = 0.05
_MAX_COUNT = 1 << 40


class PeerServer:
    """One listening thread and one for each connection, joined by :meth:`close`.

    ``own`` is served; into ``copies`` others put, and what ``keep`` gives up of it is removed.
    ``on_error`` hears of whatever ends a thread that should not have ended.
    """

    def __init__(
        self,
        own: NodeMemory,
        copies: NodeMemory,
        *,
        token: str,
        host: str = "",
        keep: Keep = LatestN(3),  # noqa: B008  frozen
        on_error: Callable[[BaseException], object] = lambda error: None,
    ) -> None:
        self._own, self._copies = own, copies
        self._token = token
        self._keep = keep
        self._on_error = on_error
        self._lock = threading.Lock()
        self._threads: dict[Wire, threading.Thread] = {}
        self._ended: set[Wire] = set()
        self._closing = threading.Event()
        self._listener = _listener_on(host)
        self._thread = threading.Thread(
            target=self._listen, name="checkpoint-peer-server", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Cut all connections and join all threads."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            for wire in self._threads.keys() - self._ended:
                wire.cut()
        for thread in self._threads.values():
            thread.join()

    # --- threads

    def _listen(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    self._closing.wait(_AFTER_FAILURE_S)  # a client that has gone, no descriptors
                    continue
                self._take(connection)
        except BaseException as error:  # noqa: BLE001  told to the owner
            self._on_error(error)

    def _take(self, connection: socket.socket) -> None:
        wire = Wire(connection, timeout_s=_EXCHANGE_S)
        thread = threading.Thread(
            target=self._serve, args=(wire,), name="checkpoint-peer-connection", daemon=True
        )
        with self._lock:
            ended, self._ended = self._ended, set()
        for gone in ended:
            self._threads.pop(gone).join()
        if len(self._threads) >= MAX_CONNECTIONS:
            wire.close()
            return
        self._threads[wire] = thread
        thread.start()

    def _serve(self, wire: Wire) -> None:
        try:
            wire.wait(_PROOF_S)
            prove_as_server(wire, self._token)
            wire.wait(_IDLE_S)
            while (request := wire.receive(MAX_REQUEST)) is not None:
                wire.expect(0)
                self._answer(wire, request)
                wire.wait(_IDLE_S)
        except OSError:
            pass  # it went away, is too slow, or is a stranger: its own side tells it
        except BaseException as error:  # noqa: BLE001  told to the owner
            self._on_error(error)
        finally:
            with self._lock:
                self._ended.add(wire)
                wire.close()

    # --- requests

    def _answer(self, wire: Wire, request: dict[str, Any]) -> None:
        try:
            kind, path = request.get("do"), request.get("path")
            if not isinstance(path, str) or not _is_ours(path):
                raise OSError(errno.EINVAL, "no such path")
            if kind == "list":
                wire.send({"names": self._names(path)})
            elif kind == "stat":
                wire.send(self._stat(path))
            elif kind == "read":
                self._send(wire, path, request)
            elif kind == "put":
                self._put(wire, path, request)
            else:
                raise OSError(errno.EINVAL, "no such request")
        except (WireError, TimeoutError, ConnectionError):
            raise
        except OSError as error:
            wire.send({"errno": error.errno or errno.EIO, "error": error.strerror or str(error)})

    @property
    def _both(self) -> Sequence[NodeMemory]:
        return (self._own, self._copies)

    def _names(self, path: str) -> list[str]:
        found: set[str] = set()
        missing = 0
        for storage in self._both:
            try:
                found.update(name for name in storage.list(path) if _is_ours(_join(path, name)))
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

    def _open_file(self, path: str) -> Source:
        with contextlib.suppress(FileNotFoundError):
            return self._own.open(path)
        return self._copies.open(path)

    def _send(self, wire: Wire, path: str, request: dict[str, Any]) -> None:
        begin, count = _number(request, "begin"), _number(request, "count")
        with contextlib.closing(self._open_file(path)) as source:
            count = max(0, min(count, source.size() - begin))
            wire.expect(count)
            wire.send({"count": count})
            with _no_way_back():
                self._stream(wire, source, begin, count)

    def _stream(self, wire: Wire, source: Source, begin: int, count: int) -> None:
        block = memoryview(bytearray(min(count, BLOCK_BYTES)))
        while count:
            piece = block[: min(count, BLOCK_BYTES)]
            if source.read_at(begin, piece) != len(piece):
                raise OSError(errno.EIO, "the file became shorter")
            wire.send_bytes(piece)
            begin, count = begin + len(piece), count - len(piece)

    def _put(self, wire: Wire, path: str, request: dict[str, Any]) -> None:
        """Say that there is room, take the bytes, and show them once their hash is right."""
        size = _number(request, "size")
        folder, _, file = path.partition("/")
        name = parse_attempt(folder)
        is_part = parse_part_file(file) is not None
        if name is None or file in ("", MANIFEST) or (is_part and size > MAX_SEALED_BYTES):
            raise OSError(errno.EINVAL, "only parts of attempts are taken")
        left, bound = self._copies.room()
        if size > left:
            raise OSError(errno.ENOSPC, f"{bound} leaves {max(left, 0)} of {size} bytes")
        self._copies.make_folder(folder)
        private = f"{folder}/.{file}.{secrets.token_hex(4)}"
        try:
            self._receive(wire, private, size)
            self._copies.rename(private, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._copies.remove(private)
            raise
        notes = self._copies.part_written(name, self._keep) if is_part else ()
        wire.send({"notes": list(notes)})

    def _receive(self, wire: Wire, private: str, size: int) -> None:
        sink = self._copies.create(private)
        try:
            wire.expect(size)
            wire.send({"go": True})
            seen, block = xxhash.xxh3_128(), memoryview(bytearray(min(size, BLOCK_BYTES)))
            with _no_way_back():
                while size:
                    piece = block[: min(size, BLOCK_BYTES)]
                    wire.fill(piece)
                    seen.update(piece)
                    sink.write(piece)
                    size -= len(piece)
            trailer = bytearray(16)
            wire.fill(memoryview(trailer))
            if bytes(trailer) != seen.digest():
                raise OSError(errno.EBADMSG, "the bytes changed on their way")
            sink.sync()
        finally:
            sink.close()


def _listener_on(host: str) -> socket.socket:
    """On that address; on all, if it is none of this machine's own (behind NAT)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=MAX_CONNECTIONS)
    except OSError:
        return socket.create_server(("", 0), family=family, backlog=MAX_CONNECTIONS)


@contextlib.contextmanager
def _no_way_back() -> Iterator[None]:
    """Among raw bytes there is no place for an answer: a failure ends the connection."""
    try:
        yield
    except OSError as error:
        raise ConnectionAbortedError(f"in the middle of a file: {error}") from error


def _is_ours(path: str) -> bool:
    """The root, a checkpoint's folder, or one writer's file in one."""
    if not path:
        return True
    folder, slash, file = path.partition("/")
    name: CheckpointName | None = parse_attempt(folder) or parse_committed(folder)
    if name is None:
        return False
    if not slash or file == MANIFEST:  # there never is one; asking is no offence
        return True
    return parse_writer_file(file) is not None or parse_part_file(file) is not None


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _number(request: dict[str, Any], key: str) -> int:
    value = request.get(key)
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise OSError(errno.EINVAL, f"{key} is not a number of bytes")
    return value
