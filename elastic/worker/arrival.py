"""How the ranks of a world meet: at rank 0's store, before any of them builds the group.

In Python and a look at a time: torch's own waits let no signal handler run and cannot be given up,
and say more on stderr than anybody wants to read. The constructor of TCPStore took 34 s for a
timeout of 15 where nobody listened, and had not returned after ten minutes from a server that
accepts and never answers (a stopped process) [measured, torch 2.13]; whoever builds a group shuts
its sockets down when time is up.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    HashStore,
    Store,
    TCPStore,
)

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.worker.faults import GroupBuildFailed

_PROBE_S = 0.1  # between two looks for a newer world, while nobody listens
_CONNECT_S = 1.0  # torch tries again and again for so long; shutting its sockets down does not help
_FIRST_LOOK_S = 0.001
_SLOWEST_LOOK_S = 0.02  # a thousand ranks that wait ask the store 50,000 times a second

GiveUp = Callable[[], None]
"""Raises if the world is over."""


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """What a world says about its group."""

    generation: int
    nonce: str
    rank: int
    size: int
    store_host: str  # rank 0's
    store_port: int


class _Patience:
    """Waits between two looks, longer each time, until the time is up."""

    def __init__(self, deadline_s: float, clock: Clock) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._pause_s = _FIRST_LOOK_S

    @property
    def left_s(self) -> float:
        return self._deadline_s - self._clock.monotonic()

    def pause(self) -> None:
        self._clock.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _SLOWEST_LOOK_S)


@dataclass(frozen=True)
class OpenStore:
    """The store of a world, as this rank has it."""

    client: Store  # for the group
    # Rank 0 only. Apart from the client, since whatever holds a group (a subgroup, a traceback, a
    # collective that does not come back) holds its store, too, and would keep the port.
    server: Store | None = None


def open_store(
    spec: GroupSpec, give_up: GiveUp, *, deadline_s: float, clock: Clock = SYSTEM_CLOCK
) -> OpenStore:
    """The world's store, hosted by rank 0. Raises GroupBuildFailed if nobody listens in time."""
    if spec.size == 1:
        return OpenStore(HashStore())
    patience = _Patience(deadline_s, clock)
    server = _tcp_store(spec, patience, is_server=True) if spec.rank == 0 else None
    while True:
        _wait_for_listener(spec, give_up, patience)
        try:
            return OpenStore(_tcp_store(spec, patience, is_server=False), server)
        except DistError:  # it has gone, or is slow
            if patience.left_s < 0:
                raise
        patience.pause()


def _tcp_store(spec: GroupSpec, patience: _Patience, *, is_server: bool) -> Store:
    store = TCPStore(
        spec.store_host,
        spec.store_port,
        spec.size,
        is_server,
        timeout=datetime.timedelta(seconds=_CONNECT_S),
        wait_for_workers=False,
    )
    store.set_timeout(datetime.timedelta(seconds=max(1.0, patience.left_s)))
    return store


def meet(
    store: Store,
    spec: GroupSpec,
    give_up: GiveUp,
    *,
    deadline_s: float,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Mark this rank's arrival and wait until all are here. Raises GroupBuildFailed.

    Rank 0 looks for all marks, the others for what it says then: one key each.
    """
    marks = [f"{spec.nonce}/arrived/{rank}" for rank in range(spec.size)]
    complete = f"{spec.nonce}/complete"
    store.set(marks[spec.rank], "1")
    awaited = marks if spec.rank == 0 else [complete]
    patience = _Patience(deadline_s, clock)
    while not store.check(awaited):
        give_up()
        if patience.left_s < 0:
            missing = tuple(rank for rank, mark in enumerate(marks) if not store.check([mark]))
            raise GroupBuildFailed(
                f"ranks {list(missing)} did not come to generation {spec.generation}",
                missing=missing,
                hint="look at the logs of their nodes",
            )
        patience.pause()
    if spec.rank == 0:
        store.set(complete, "1")


def _wait_for_listener(spec: GroupSpec, give_up: GiveUp, patience: _Patience) -> None:
    address = spec.store_host, spec.store_port
    while True:
        give_up()
        try:
            socket.create_connection(address, timeout=_PROBE_S).close()
            return
        except OSError as error:
            if patience.left_s < 0:
                raise GroupBuildFailed(
                    f"rank 0 of generation {spec.generation} does not listen at "
                    f"{spec.store_host}:{spec.store_port}: {error}",
                    missing=(0,),
                    hint="look at the log of its node, and whether a firewall is between",
                ) from None
        patience.pause()
