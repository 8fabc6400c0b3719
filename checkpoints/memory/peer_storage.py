"""The memory of another node, as a storage: parts are read from it, replicas are put into it.

The other end is :mod:`checkpoints.memory.peer_server`. A peer that is slow, unreachable or
full raises ``OSError``; callers continue without it.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import xxhash

from checkpoints.intervals import PEER_REQUEST_S
from checkpoints.memory.peer_server import BLOCK_BYTES, MAX_RESPONSE
from checkpoints.storage.protocol import ReadableFile, WritableFile
from elastic.secure_channel.channel import Channel
from elastic.secure_channel.errors import ProtocolError
from elastic.secure_channel.keys import SecretKey
from elastic.secure_channel.tls import Tls

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
