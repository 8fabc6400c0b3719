"""A store for the ranks of one world, in Python: what torch's TCPStore cannot do.

TCPStore asks the name service for the name of every address that it connects to or accepts, four
times per store, and for nothing but its log lines (``formatSockAddr`` in torch's ``socket.cpp``).
Where such a question is lost or slow, each takes 5 s: in one of 15 to 100 stores on the machine
that this was written on [measured with strace, torch 2.13]. Its constructor also cannot be given
up, and does not know whether it talks to the store of this world or to what is left of another.

Here every wait is in Python and looks, ten times a second, whether it is to be given up; a client
of another world is turned away by its nonce. The values are a few hundred bytes per rank, while a
group is built. A frame is its length and JSON; nothing that is received is executed.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    Store,
)

from elastic.clock import SYSTEM_CLOCK
from elastic.telemetry.log import get_logger

_SLICE_S = 0.1  # between two looks whether to give up; signal handlers run as well
_LENGTH = struct.Struct("!I")
_LARGEST_FRAME = 1 << 20
_CONNECTIONS_PER_RANK = 4

Json = dict[str, Any]


@dataclass(eq=False)
class _Peer:
    """A connection, as the server sees it."""

    socket: socket.socket
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    is_known: bool = False  # has told the nonce
    awaited: tuple[int, list[str]] | None = None  # the request it waits for, and its keys


class StoreServer:
    """Rank 0's: holds the values. Raises OSError if the port is taken."""

    def __init__(self, port: int, *, nonce: str, size: int) -> None:
        self._nonce = nonce
        self._values: dict[str, bytes] = {}
        self._peers: set[_Peer] = set()
        self._most_peers = size * _CONNECTIONS_PER_RANK
        self._listener = _listen(port, backlog=self._most_peers)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for watched in (self._listener, self._woken):
            watched.setblocking(False)
            self._selector.register(watched, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="elastic-store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections, and free the port."""
        # A byte, not the end of the stream: a forked data worker holds the other end, too.
        with contextlib.suppress(OSError):  # closed before
            self._wake.send(b"x")
        self._thread.join()
        self._wake.close()

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        except Exception:  # noqa: BLE001  reported; peers see their connections close
            get_logger().exception("the store of this world has failed")
        finally:
            for peer in list(self._peers):
                self._forget(peer)
            self._selector.close()
            self._listener.close()
            self._woken.close()

    def _serve(self) -> bool:
        for key, events in self._selector.select():
            if key.fileobj is self._woken:
                return False
            if key.fileobj is self._listener:
                self._accept()
                continue
            peer = key.data
            try:
                if events & selectors.EVENT_WRITE:
                    self._flush(peer)
                if events & selectors.EVENT_READ:
                    self._receive(peer)
            except (OSError, ValueError, KeyError, TypeError):
                self._forget(peer)  # gone, or not one of ours
        return True

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # gone before it was accepted
        if len(self._peers) >= self._most_peers:
            connection.close()
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = _Peer(connection)
        self._peers.add(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _forget(self, peer: _Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            self._selector.unregister(peer.socket)
            peer.socket.close()

    def _receive(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError
        peer.received += data
        for request in _frames(peer.received):
            self._answer(peer, request)

    def _answer(self, peer: _Peer, request: Json) -> None:
        number = int(request["id"])
        if not peer.is_known:
            if request["op"] != "hello" or request["nonce"] != self._nonce:
                raise ValueError("a client of another world")
            peer.is_known = True
            self._send(peer, number, True)
        elif request["op"] == "wait":
            peer.awaited = number, [str(key) for key in request["keys"]]
            self._settle(peer)
        else:
            self._send(peer, number, self._operate(request))

    def _operate(self, request: Json) -> Any:
        match request["op"]:
            case "set":
                self._put(str(request["key"]), _bytes(request["value"]))
                return True
            case "get":
                value = self._values.get(request["key"])
                return None if value is None else _text(value)
            case "add":
                total = int(self._values.get(request["key"], b"0")) + int(request["by"])
                self._put(str(request["key"]), str(total).encode())
                return total
            case "check":
                return all(key in self._values for key in request["keys"])
            case "compare":
                return self._compare_set(request)
            case "delete":
                return self._values.pop(request["key"], None) is not None
            case "count":
                return len(self._values)
        raise ValueError(f"unknown request {request['op']!r}")

    def _compare_set(self, request: Json) -> str:
        """As TCPStore does it: a missing key is set if the expected value is empty."""
        key, expected = str(request["key"]), _bytes(request["expected"])
        if self._values.get(key, b"") == expected:
            self._put(key, _bytes(request["value"]))
        return _text(self._values.get(key, expected))

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for peer in list(self._peers):
            if peer.awaited is not None and key in peer.awaited[1]:
                self._settle(peer)

    def _settle(self, peer: _Peer) -> None:
        assert peer.awaited is not None
        number, keys = peer.awaited
        if all(key in self._values for key in keys):
            peer.awaited = None
            self._send(peer, number, [_text(self._values[key]) for key in keys])

    def _send(self, peer: _Peer, number: int, result: Any) -> None:
        peer.unsent += _frame({"id": number, "result": result})
        with contextlib.suppress(OSError):  # it is gone; its next event says so
            self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        while peer.unsent:
            try:
                del peer.unsent[: peer.socket.send(peer.unsent)]
            except BlockingIOError:
                break
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.socket, events, peer)


class WorldStore(Store):
    """A client of :class:`StoreServer`, in the shape that torch's groups take. Thread-safe.

    Raises DistStoreError when a key does not come in time, DistNetworkError when the server is
    gone, and what ``give_up`` raises.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        nonce: str,
        timeout_s: float,
        give_up: Callable[[], None],
    ) -> None:
        super().__init__()
        self._socket = connection
        self._timeout_s = timeout_s
        self._give_up = give_up
        self._lock = threading.Lock()
        self._received = bytearray()
        self._next = 0
        self._seen: dict[str, bytes] = {}  # told with the last wait(): torch asks for it next
        connection.settimeout(_SLICE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ask({"op": "hello", "nonce": nonce})

    def close(self) -> None:
        """The connection ends."""
        self._socket.close()

    def set(self, key: str, value: str | bytes) -> None:
        raw = value if isinstance(value, bytes) else value.encode()
        self._ask({"op": "set", "key": key, "value": _text(raw)})

    def get(self, key: str) -> bytes:
        if (value := self._seen.pop(key, None)) is not None:
            return value
        told = self._ask({"op": "wait", "keys": [key]})
        return _bytes(told[0])

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        told = self._ask({"op": "wait", "keys": keys}, timeout_s=timeout_s)
        self._seen = dict(zip(keys, map(_bytes, told), strict=True))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask({"op": "check", "keys": keys}))

    def add(self, key: str, value: int) -> int:
        return int(self._ask({"op": "add", "key": key, "by": value}))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        pair = {"expected": _text(_raw(expected_value)), "value": _text(_raw(desired_value))}
        return _bytes(self._ask({"op": "compare", "key": key, **pair}))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask({"op": "delete", "key": key}))

    def num_keys(self) -> int:
        return int(self._ask({"op": "count"}))

    # The names that torch calls them by, from C++ (its PythonStore in csrc's init.cpp).
    deleteKey = delete_key
    getNumKeys = num_keys

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self._timeout_s)

    def clone(self) -> WorldStore:
        return self  # calls are serialised by the lock

    def _ask(self, request: Json, *, timeout_s: float | None = None) -> Any:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline_s = SYSTEM_CLOCK.monotonic() + limit_s
        with self._lock:
            self._seen = {}
            self._next += 1
            try:
                self._socket.sendall(_frame({"id": self._next, **request}))
                return self._await_answer(self._next, deadline_s)
            except TimeoutError:
                keys = request.get("keys") or request.get("key")
                raise DistStoreError(f"wait timeout after {limit_s:.1f} s, keys: {keys}") from None
            except (OSError, ValueError) as error:
                raise DistNetworkError(f"the store of this world is gone: {error}") from None

    def _await_answer(self, number: int, deadline_s: float) -> Any:
        while True:
            for answer in _frames(self._received):
                if answer["id"] == number:  # others come too late, for what timed out
                    return answer["result"]
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                self._give_up()
                if SYSTEM_CLOCK.monotonic() > deadline_s:
                    raise
                continue
            if not data:
                raise ConnectionResetError("connection closed")
            self._received += data


def connect(
    host: str,
    port: int,
    *,
    nonce: str,
    timeout_s: float,
    give_up: Callable[[], None],
) -> WorldStore:
    """One try. Raises OSError if nobody listens, DistNetworkError if it is another world's."""
    connection = socket.create_connection((host, port), timeout=_SLICE_S)
    try:
        return WorldStore(connection, nonce=nonce, timeout_s=timeout_s, give_up=give_up)
    except BaseException:
        connection.close()
        raise


def _listen(port: int, *, backlog: int) -> socket.socket:
    """On all addresses. The agent has reserved the port with a socket that is bound and does not
    listen; ``create_server`` sets SO_REUSEADDR, which lets this one have it."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=backlog)


def _frame(message: Json) -> bytes:
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


def _frames(buffer: bytearray) -> Iterator[Json]:
    """Take the complete frames out of ``buffer``. Raises ValueError for what is none."""
    while len(buffer) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer)
        if length > _LARGEST_FRAME:
            raise ValueError(f"a frame of {length} bytes")
        if len(buffer) < _LENGTH.size + length:
            return
        data = bytes(buffer[_LENGTH.size : _LENGTH.size + length])
        del buffer[: _LENGTH.size + length]
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ValueError("a frame that is no object")
        yield message


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _raw(value: str | bytes | Sequence[int]) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
