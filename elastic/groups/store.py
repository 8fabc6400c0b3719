"""The store of one world: how its ranks find it, and wait for each other."""

from __future__ import annotations

import base64
import binascii
import datetime
import functools
import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    HashStore,
    Store,
    TCPStore,
)

from elastic.errors import SYSTEM_CLOCK, Clock, ConfigError, GroupBuildFailed, JoinTimeout
from elastic.groups.world import World, fresh_nonce
from elastic.link.link import GroupSpec
from elastic.telemetry.log import get_logger
from elastic.tuning.intervals import (
    BUILD_MIN_S,
    SLOWEST_LOOK_S,
    peer_silence_of,
)
from elastic.wire import base
from elastic.wire.base import PEER_SILENCE_S, Limits, ProtocolError
from elastic.wire.channel import Channel
from elastic.wire.handshake import Credentials, SecretKey
from elastic.wire.hub import Connection, Handler, Hub
from elastic.wire.tls import Tls, TlsFiles

# Polling interval for a newer world while the store's port refuses connections.
STORE_HOST_PROBE_S = 0.1
# The first polling pause for a missing key; each further one is twice as long.
FIRST_LOOK_S = 0.001
# Polling interval for the other ranks of a world that no agent has announced.
DISCOVERY_LOOK_S = 0.02
# A call to the store checks this often whether to give up; signal handlers run as well.
WORLD_STORE_SLICE_S = 0.1

# ----------------------------------------------------------------------------
# A store for the ranks of one world, in Python, because of three limitations of TCPStore.
#
# torch's TCPStore performs a reverse DNS lookup for every address that it connects to or accepts,
# four per store, only for its log lines (``formatSockAddr`` in torch's ``socket.cpp``). A lost or
# slow lookup takes 5 s: in one of 15 to 100 stores on the development machine [measured with
# strace, torch 2.13]. Its constructor also cannot be interrupted, and cannot distinguish the store
# of this world from a leftover one of another.
#
# Here every wait is in Python and checks ten times a second whether it should stop. Server and
# clients prove to each other that they know the run's key and belong to the same world
# (:mod:`elastic.wire`), which takes no more round trips than an exchange of the nonce.
# The values are a few hundred bytes per rank, while a group is built. Nothing received is
# executed, and an invalid request only closes its connection.

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
        self._hub.send(connection, base.encode({"id": number, "result": result}))


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
    request = base.decode(payload)
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


# ----------------------------------------------------------------------------
# The rendezvous of a world's ranks at rank 0's store, before any of them builds the group.
#
# torch's store is polled in Python: its own waits run no signal handlers, cannot be interrupted,
# and flood stderr.
#
# gloo gets our own store, for the reasons above. NCCL gets torch's,
# because its watchdogs query the store from their own threads. TCPStore's constructor took 34 s
# with a timeout of 15 s, and did not return within ten minutes from a server that accepts and
# never answers (a stopped process) [measured, torch 2.13]. The code that builds a group therefore
# shuts the store's sockets down after the timeout.

GiveUp = Callable[[], None]
"""Called during waits; raises if the world has ended."""


class _Backoff:
    """Exponential pauses between polls, and the time until the deadline."""

    def __init__(self, deadline_s: float, clock: Clock) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._pause_s = FIRST_LOOK_S

    @property
    def left_s(self) -> float:
        return self._deadline_s - self._clock.monotonic()

    def pause(self) -> None:
        self._clock.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, SLOWEST_LOOK_S)


@dataclass(frozen=True)
class OpenStore:
    """This rank's connection to its world's store and, on rank 0, the server."""

    client: Store  # for the group
    # Rank 0 only. Separate from the client, because every reference to a group (a subgroup, a
    # traceback, a collective that does not return) also references its store, and would keep
    # the port in use.
    server: StoreServer | Store | None = None

    def close(self) -> None:
        """Close it, after the group is destroyed. torch's stores close with their last
        reference."""
        if isinstance(self.client, WorldStore):
            self.client.close()
        if isinstance(self.server, StoreServer):
            self.server.close()


def open_store(
    spec: GroupSpec,
    give_up: GiveUp,
    *,
    deadline_s: float,
    use_tcp_store: bool,
    clock: Clock = SYSTEM_CLOCK,
) -> OpenStore:
    """Connect to the world's store; rank 0 also hosts it.

    Raises:
        GroupBuildFailed: no server listens in time.
        OSError, DistError: rank 0 cannot listen.
    """
    if spec.size == 1:
        return OpenStore(HashStore())
    backoff = _Backoff(deadline_s, clock)
    server = _serve(spec, backoff, use_tcp_store=use_tcp_store) if spec.rank == 0 else None
    try:
        return OpenStore(_join(spec, give_up, backoff, use_tcp_store=use_tcp_store), server)
    except BaseException:
        if isinstance(server, StoreServer):
            server.close()
        raise


def _serve(spec: GroupSpec, backoff: _Backoff, *, use_tcp_store: bool) -> StoreServer | Store:
    if use_tcp_store:
        return _tcp_store(spec, backoff, is_server=True)
    return StoreServer(
        spec.store_port,
        nonce=spec.nonce,
        size=spec.size,
        key=SecretKey.parse(spec.store_key),
        tls=_tls_of(spec),
        silence_s=peer_silence_of(os.environ),
    )


def _join(spec: GroupSpec, give_up: GiveUp, backoff: _Backoff, *, use_tcp_store: bool) -> Store:
    """Connect as soon as rank 0 listens."""
    while True:
        give_up()
        try:
            if use_tcp_store:
                # Wait for the port here, not in TCPStore's constructor.
                address = spec.store_host, spec.store_port
                socket.create_connection(address, timeout=STORE_HOST_PROBE_S).close()
                return _tcp_store(spec, backoff, is_server=False)
            return connect(
                spec.store_host,
                spec.store_port,
                nonce=spec.nonce,
                key=SecretKey.parse(spec.store_key),
                tls=_tls_of(spec),
                timeout_s=max(BUILD_MIN_S, backoff.left_s),
                give_up=give_up,
                silence_s=peer_silence_of(os.environ),
            )
        except (OSError, DistNetworkError) as error:
            if backoff.left_s < 0:
                raise GroupBuildFailed(
                    f"rank 0 of generation {spec.generation} does not answer at "
                    f"{spec.store_host}:{spec.store_port}: {first_line(error)}",
                    missing=(0,),
                    hint="check the log of its node, whether its script calls elastic.join(), and "
                    "whether a firewall blocks the port",
                ) from None
        backoff.pause()


def _tls_of(spec: GroupSpec) -> Tls | None:
    """Raises OSError if the certificates cannot be used."""
    return _loaded(spec.store_tls) if spec.store_tls is not None else None


@functools.cache
def _loaded(files: TlsFiles) -> Tls:
    """Cached for all worlds: reading and checking certificates takes milliseconds."""
    return Tls(files, report=get_logger().warning)


def first_line(error: BaseException) -> str:
    """An error's message, without the C++ stack that torch appends."""
    return str(error).partition("\n")[0]


def _tcp_store(spec: GroupSpec, backoff: _Backoff, *, is_server: bool) -> Store:
    return TCPStore(
        spec.store_host,
        spec.store_port,
        spec.size,
        is_server,
        timeout=datetime.timedelta(seconds=max(BUILD_MIN_S, backoff.left_s)),
        wait_for_workers=False,
    )


def rendezvous(
    store: Store,
    spec: GroupSpec,
    give_up: GiveUp,
    *,
    deadline_s: float,
    mesh: str = "",
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Mark this rank's arrival, wait until all ranks have arrived, and compare their meshes.

    Rank 0 waits for all marks, and the others for its result: one key each. ``mesh``: the
    dimensions of this rank's replica. They are part of the mark: comparing them by collectives took
    a third of the time needed to build the groups of a world of replicas [measured].

    Raises:
        GroupBuildFailed: other ranks did not arrive in time, or their mesh differs from rank 0's.
        ConfigError: this rank's mesh differs from rank 0's.
    """
    marks = [f"{spec.nonce}/arrived/{rank}" for rank in range(spec.size)]
    complete = f"{spec.nonce}/complete"
    store.set(marks[spec.rank], json.dumps(mesh))
    backoff = _Backoff(deadline_s, clock)
    if not _wait_for(store, marks if spec.rank == 0 else [complete], give_up, backoff):
        missing = tuple(rank for rank, mark in enumerate(marks) if not store.check([mark]))
        raise GroupBuildFailed(
            f"ranks {list(missing)} did not join generation {spec.generation}",
            missing=missing,
            hint="check the logs of their nodes, and whether their scripts call elastic.join()",
        )
    if spec.rank == 0:
        meshes = [str(json.loads(store.get(mark))) for mark in marks]
        others = {str(rank): its for rank, its in enumerate(meshes) if its != meshes[0]}
        store.set(complete, json.dumps([mesh, others]))
    else:
        mesh_of_first, others = json.loads(store.get(complete))
        meshes = [others.get(str(rank), mesh_of_first) for rank in range(spec.size)]
    _compare(spec.rank, meshes)


def _wait_for(store: Store, keys: list[str], give_up: GiveUp, backoff: _Backoff) -> bool:
    """Wait for keys. Returns whether all were set in time."""
    if isinstance(store, WorldStore):  # it calls give_up while it waits
        give_up()
        try:
            store.wait(keys, datetime.timedelta(seconds=max(0.0, backoff.left_s)))
        except DistStoreError:
            return False
        return True
    while not store.check(keys):
        give_up()
        if backoff.left_s < 0:
            return False
        backoff.pause()
    return True


def _compare(rank: int, meshes: list[str]) -> None:
    """Refuse ranks whose mesh differs from rank 0's; the others continue without them.

    Raises ConfigError on a refused rank, GroupBuildFailed on the others.
    """
    others = tuple(r for r, mesh in enumerate(meshes) if mesh != meshes[0])
    if rank in others:
        raise ConfigError(
            f"elastic.join(mesh=…) of rank {rank} has the dimensions {meshes[rank] or 'none'}, "
            f"but rank 0 has {meshes[0] or 'none'}",
            hint="pass the same mesh, in the same order, on every node",
        )
    if others:
        raise GroupBuildFailed(
            f"ranks {list(others)} have another mesh: {meshes[others[0]] or 'none'}, not "
            f"{meshes[rank] or 'none'} as this rank",
            missing=others,
            hint="they are refused; see the logs of their nodes",
        )


# ----------------------------------------------------------------------------
# How workers that were started together find each other in a store that outlives them.
#
# torchrun's stock backends use the same store for every start of the workers, and since about
# torch 2.11 nothing distinguishes the keys of two starts (``rendezvous.py`` documents that the
# store is new for every retry; with c10d it is not). A worker then connects to the address of a
# dead one: seen in one of three restarts with ``--standalone`` [measured, 2.13.0]. The restart
# count does not help, because agents that joined at different times count differently.
#
# Rank 0 therefore offers a new nonce, each other rank answers with a token, and rank 0 closes the
# offer for each token when all have answered. A dead rank 0 never closes its offer for the token
# of a live rank, which polls until a new offer appears. The nonce becomes the world's, and the
# prefix of all its keys.


class RendezvousStore(Protocol):
    """The methods of torch.distributed's stores that this module uses."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


def store_of_launcher(world: World, timeout_s: float) -> Store:
    """The store that the launcher's environment names; for a process without one, its own."""
    if not world.is_launched:
        return HashStore()
    timeout = datetime.timedelta(seconds=timeout_s)
    store: Store = next(dist.rendezvous("env://", timeout=timeout))[0]  # type: ignore[attr-defined]
    return store


def agree_on_nonce(
    store: RendezvousStore, rank: int, size: int, *, timeout_s: float, clock: Clock = SYSTEM_CLOCK
) -> str:
    """The nonce that all ``size`` workers of this start agree on. Raises JoinTimeout."""
    deadline_s = clock.monotonic() + timeout_s
    if rank == 0:
        return _offer(store, size, deadline_s, clock)
    return _answer(store, rank, deadline_s, clock)


def _offer(store: RendezvousStore, size: int, deadline_s: float, clock: Clock) -> str:
    nonce = fresh_nonce()
    store.set("elastic/offer", nonce)
    answers = {rank: f"elastic/{nonce}/answer/{rank}" for rank in range(1, size)}
    while missing := [rank for rank, key in answers.items() if not store.check([key])]:
        _pause(deadline_s, clock, f"ranks {missing} have not arrived")
    for key in answers.values():
        store.set(f"elastic/{nonce}/closed/{store.get(key).decode()}", "1")
    return nonce


def _answer(store: RendezvousStore, rank: int, deadline_s: float, clock: Clock) -> str:
    token, answered = fresh_nonce(), ""
    while True:
        offered = store.get("elastic/offer").decode() if store.check(["elastic/offer"]) else ""
        if offered and offered != answered:
            store.set(f"elastic/{offered}/answer/{rank}", token)
            answered = offered
        if answered and store.check([f"elastic/{answered}/closed/{token}"]):
            return answered
        _pause(deadline_s, clock, "rank 0 has not arrived")


def _pause(deadline_s: float, clock: Clock, missing_ranks: str) -> None:
    if clock.monotonic() > deadline_s:
        raise JoinTimeout(
            f"the workers of this start did not find each other: {missing_ranks}",
            hint="check the logs of the missing ranks",
        )
    clock.sleep(DISCOVERY_LOOK_S)
