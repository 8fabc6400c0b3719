"""A store for the ranks of one world, in Python, because of three limitations of TCPStore.

torch's TCPStore performs a reverse DNS lookup for every address that it connects to or accepts,
four per store, only for its log lines (``formatSockAddr`` in torch's ``socket.cpp``). A lost or
slow lookup takes 5 s: in one of 15 to 100 stores on the development machine [measured with strace,
torch 2.13]. Its constructor also cannot be interrupted, and cannot distinguish the store of this
world from a leftover one of another.

Here every wait is in Python and checks ten times a second whether it should stop. Server and
clients prove to each other that they know the run's key and belong to the same world
(:mod:`elastic.secure_channel`), which takes no more round trips than an exchange of the nonce. The
values are a few hundred bytes per rank, while a group is built. Nothing received is executed, and
an invalid request only closes its connection.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    Store,
)

from elastic.secure_channel import strict_json
from elastic.secure_channel.channel import Channel
from elastic.secure_channel.connection import Connection, Handler
from elastic.secure_channel.errors import ProtocolError
from elastic.secure_channel.handshake import Credentials
from elastic.secure_channel.hub import Hub
from elastic.secure_channel.keys import SecretKey
from elastic.secure_channel.limits import PEER_SILENCE_S, Limits
from elastic.secure_channel.tls import Tls
from elastic.telemetry.log import get_logger
from elastic.tuning.worker_intervals import WORLD_STORE_SLICE_S

_LARGEST_FRAME = 1 << 20
_LARGEST_RESPONSE = 8 * _LARGEST_FRAME  # the response to a wait contains the values of all its keys
_CONNECTIONS_PER_RANK = 4
_BACKLOG = 512  # if it is full, clients retry only after a second
_PENDING = 64  # in addition to one per rank: all may connect at once, perhaps from one machine

Json = dict[str, Any]
# The fields of each request, in addition to its number and name.
_FIELDS: dict[str, dict[str, type]] = {
    "set": {"key": str, "value": str},
    "get": {"key": str},
    "add": {"key": str, "by": int},
    "check": {"keys": list},
    "wait": {"keys": list},
    "compare": {"key": str, "expected": str, "value": str},
    "delete": {"key": str},
    "count": {},
}


def limits_of(size: int, silence_s: float = PEER_SILENCE_S) -> Limits:
    """The limits for clients of the store of a world with ``size`` ranks."""
    return Limits(
        frame_bytes=_LARGEST_FRAME,
        unsent_bytes=2 * _LARGEST_RESPONSE,
        open_connections=size * _CONNECTIONS_PER_RANK,
        pending_connections=size + _PENDING,
        pending_per_address=size + _PENDING,
        silence_s=silence_s,
    )


class StoreServer(Handler):
    """Rank 0's server, which holds the values. Raises OSError if the port is in use."""

    def __init__(
        self,
        port: int,
        *,
        nonce: str,
        size: int,
        key: SecretKey,
        tls: Tls | None = None,
        silence_s: float = PEER_SILENCE_S,
    ) -> None:
        self._nonce = nonce
        self._values: dict[str, bytes] = {}
        self._awaited: dict[Connection, tuple[int, list[str]]] = {}  # the request's number and keys
        limits = limits_of(size, silence_s)
        self._hub = Hub(
            "elastic-store",
            _listen(port, backlog=max(_BACKLOG, 2 * size)),
            self,
            credentials=Credentials(key=lambda: key, identity=nonce, tls=tls),
            limits=limits,
            report=get_logger().warning,
            on_error=self._died,
        )
        self._hub.start()

    def close(self) -> None:
        """End all connections, and free the port."""
        self._hub.close()

    def _died(self, error: BaseException) -> None:
        # Peers see their connections close.
        get_logger().error("the store of this world has failed", exc_info=error)

    def opened(self, connection: Connection) -> None:
        """Handler: a client has proved that it knows the run's key."""
        if connection.identity != self._nonce:
            raise ProtocolError("the client belongs to another world")

    def received(self, connection: Connection, payload: bytes) -> None:
        """Handler: a request has arrived."""
        request = _request(payload)
        number = request["id"]
        if request["op"] == "wait":
            self._awaited[connection] = number, request["keys"]
            self._respond_if_set(connection)
        else:
            self._send(connection, number, self._operate(request))

    def closed(self, connection: Connection) -> None:
        """Handler: a client has disconnected."""
        self._awaited.pop(connection, None)

    def _operate(self, request: Json) -> Any:
        match request["op"]:
            case "set":
                self._put(request["key"], _bytes(request["value"]))
                return True
            case "get":
                value = self._values.get(request["key"])
                return None if value is None else _text(value)
            case "add":
                total = _number(self._values.get(request["key"], b"0")) + request["by"]
                self._put(request["key"], str(total).encode())
                return total
            case "check":
                return all(key in self._values for key in request["keys"])
            case "compare":
                return self._compare_set(request)
            case "delete":
                return self._values.pop(request["key"], None) is not None
            case "count":
                return len(self._values)
        raise ProtocolError(f"unknown request {request['op']!r}")

    def _compare_set(self, request: Json) -> str:
        """Same semantics as TCPStore: a missing key is set if the expected value is empty."""
        key, expected = request["key"], _bytes(request["expected"])
        if self._values.get(key, b"") == expected:
            self._put(key, _bytes(request["value"]))
        return _text(self._values.get(key, expected))

    def _put(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for connection in list(self._awaited):
            self._respond_if_set(connection, key)

    def _respond_if_set(self, connection: Connection, news: str | None = None) -> None:
        """Respond to a wait whose keys all exist. ``news``: the key that was just set."""
        number, keys = self._awaited.get(connection, (0, []))
        if not keys or (news is not None and news not in keys):
            return  # or the connection was dropped while another one was answered
        if all(key in self._values for key in keys):
            del self._awaited[connection]
            self._send(connection, number, [_text(self._values[key]) for key in keys])

    def _send(self, connection: Connection, number: int, result: Any) -> None:
        self._hub.send(connection, strict_json.encode({"id": number, "result": result}))


class WorldStore(Store):
    """A client of :class:`StoreServer` with the interface that torch's groups require. Thread-safe.

    Methods raise DistStoreError if a key is not set in time, DistNetworkError if the server has
    ended, and the exceptions of ``give_up``.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        nonce: str,
        key: SecretKey,
        timeout_s: float,
        give_up: Callable[[], None],
        tls: Tls | None = None,
        silence_s: float = PEER_SILENCE_S,
    ) -> None:
        super().__init__()
        self._channel = Channel(
            connection,
            timeout_s=timeout_s,
            tls=tls,
            slice_s=WORLD_STORE_SLICE_S,
            look=give_up,
            silence_s=silence_s,
        )
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._next_id = 0
        self._seen: dict[str, bytes] = {}  # received with the last wait(): torch reads them next
        try:
            self._channel.authenticate(key, nonce, expected=nonce)
        except BaseException as error:
            self._channel.close()
            if not isinstance(error, OSError):
                raise
            raise DistNetworkError(
                f"the listener there is not this world's store: {error}"
            ) from None

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def set(self, key: str, value: str | bytes) -> None:
        raw = value if isinstance(value, bytes) else value.encode()
        self._call({"op": "set", "key": key, "value": _text(raw)})

    def get(self, key: str) -> bytes:
        if (value := self._seen.pop(key, None)) is not None:
            return value
        values = self._call({"op": "wait", "keys": [key]})
        return _bytes(values[0])

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        values = self._call({"op": "wait", "keys": keys}, timeout_s=timeout_s)
        self._seen = dict(zip(keys, map(_bytes, values), strict=True))

    def check(self, keys: list[str]) -> bool:
        return bool(self._call({"op": "check", "keys": keys}))

    def add(self, key: str, value: int) -> int:
        return int(self._call({"op": "add", "key": key, "by": value}))

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        pair = {"expected": _text(_raw(expected_value)), "value": _text(_raw(desired_value))}
        return _bytes(self._call({"op": "compare", "key": key, **pair}))

    def delete_key(self, key: str) -> bool:
        return bool(self._call({"op": "delete", "key": key}))

    def num_keys(self) -> int:
        return int(self._call({"op": "count"}))

    # The names by which torch calls them from C++ (PythonStore in csrc's init.cpp).
    deleteKey = delete_key
    getNumKeys = num_keys

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self._timeout_s)

    def clone(self) -> WorldStore:
        return self  # the lock serializes calls

    def _call(self, request: Json, *, timeout_s: float | None = None) -> Any:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        with self._lock:
            self._seen = {}
            self._next_id += 1
            self._channel.wait(limit_s)
            try:
                self._channel.send({"id": self._next_id, **request})
                return self._await_response(self._next_id)
            except TimeoutError:
                keys = request.get("keys") or request.get("key")
                raise DistStoreError(f"wait timeout after {limit_s:.1f} s, keys: {keys}") from None
            except (OSError, ValueError) as error:
                raise DistNetworkError(f"this world's store is lost: {error}") from None

    def _await_response(self, number: int) -> Any:
        while (response := self._channel.receive(_LARGEST_RESPONSE)) is not None:
            if response.get("id") == number:  # others belong to requests that timed out
                return response.get("result")
        raise ConnectionResetError("connection closed")


def connect(
    host: str,
    port: int,
    *,
    nonce: str,
    key: SecretKey,
    timeout_s: float,
    give_up: Callable[[], None],
    tls: Tls | None = None,
    silence_s: float = PEER_SILENCE_S,
) -> WorldStore:
    """Connect once.

    Raises OSError if no server listens, DistNetworkError if the server belongs to another world or
    does not have the run's key.
    """
    connection = socket.create_connection((host, port), timeout=WORLD_STORE_SLICE_S)
    try:
        return WorldStore(
            connection,
            nonce=nonce,
            key=key,
            timeout_s=timeout_s,
            give_up=give_up,
            tls=tls,
            silence_s=silence_s,
        )
    except BaseException:
        connection.close()
        raise


def _listen(port: int, *, backlog: int) -> socket.socket:
    """Listen on all addresses.

    The agent has reserved the port with a bound socket that does not listen. ``create_server`` sets
    SO_REUSEADDR, with which this socket can bind to the same port.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=backlog)


def _request(payload: bytes) -> Json:
    """Parse a request, which must have exactly its fields. Raises ProtocolError."""
    request = strict_json.decode(payload)
    operation = request.get("op")
    fields = _FIELDS.get(operation) if isinstance(operation, str) else None
    if fields is None or type(request.get("id")) is not int:
        raise ProtocolError(f"not a request: {payload[:80]!r}")
    if request.keys() != {"id", "op", *fields}:
        raise ProtocolError(f"{operation} has unexpected or missing fields: {payload[:80]!r}")
    for name, kind in fields.items():
        if type(request[name]) is not kind:
            raise ProtocolError(f"{operation}.{name} is not {kind.__name__}: {payload[:80]!r}")
    if not all(isinstance(key, str) for key in request.get("keys", ())):
        raise ProtocolError(f"{operation}.keys holds a value that is not a str: {payload[:80]!r}")
    return request


def _number(value: bytes) -> int:
    try:
        return int(value)
    except ValueError:
        raise ProtocolError("add: the value is not a number") from None


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ProtocolError("the value is not base64") from None


def _raw(value: str | bytes | Sequence[int]) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
