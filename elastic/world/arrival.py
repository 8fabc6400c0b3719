"""The rendezvous of a world's ranks at rank 0's store, before any of them builds the group.

torch's store is polled in Python: its own waits run no signal handlers, cannot be interrupted, and
flood stderr.

gloo gets our own store, for the reasons in :mod:`elastic.world.world_store`. NCCL gets torch's,
because its watchdogs query the store from their own threads. TCPStore's constructor took 34 s with
a timeout of 15 s, and did not return within ten minutes from a server that accepts and never
answers (a stopped process) [measured, torch 2.13]. The code that builds a group therefore shuts
the store's sockets down after the timeout.
"""

from __future__ import annotations

import datetime
import functools
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import (  # type: ignore[attr-defined]
    DistNetworkError,
    DistStoreError,
    HashStore,
    Store,
    TCPStore,
)

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import ConfigError
from elastic.secure_channel.keys import SecretKey
from elastic.secure_channel.limits import PEER_SILENCE_S
from elastic.secure_channel.tls import Tls, TlsFiles
from elastic.telemetry.log import get_logger
from elastic.tuning.worker_intervals import (
    BUILD_MIN_S,
    FIRST_LOOK_S,
    SLOWEST_LOOK_S,
    STORE_HOST_PROBE_S,
)
from elastic.world.faults import GroupBuildFailed
from elastic.world.world_store import StoreServer, WorldStore, connect

GiveUp = Callable[[], None]
"""Called during waits; raises if the world has ended."""


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """The parameters from which a world's process group is built."""

    generation: int
    nonce: str
    rank: int
    size: int
    store_host: str  # rank 0's
    store_port: int
    store_key: SecretKey  # authenticates at the store
    store_tls: TlsFiles | None = None  # this node's certificates; None: without TLS
    silence_s: float = PEER_SILENCE_S  # of a peer's machine, before its connection is closed


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
        key=spec.store_key,
        tls=_tls_of(spec),
        silence_s=spec.silence_s,
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
                key=spec.store_key,
                tls=_tls_of(spec),
                timeout_s=max(BUILD_MIN_S, backoff.left_s),
                give_up=give_up,
                silence_s=spec.silence_s,
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


def meet(
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
