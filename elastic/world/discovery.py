"""How workers that were started together find each other in a store that outlives them.

torchrun's stock backends use the same store for every start of the workers, and since about torch
2.11 nothing distinguishes the keys of two starts (``rendezvous.py`` documents that the store is new
for every retry; with c10d it is not). A worker then connects to the address of a dead one: seen in
one of three restarts with ``--standalone`` [measured, 2.13.0]. The restart count does not help,
because agents that joined at different times count differently.

Rank 0 therefore offers a new nonce, each other rank answers with a token, and rank 0 closes the
offer for each token when all have answered. A dead rank 0 never closes its offer for the token of
a live rank, which polls until a new offer appears. The nonce becomes the world's, and the prefix
of all its keys.
"""

from __future__ import annotations

import datetime
from typing import Protocol

import torch.distributed as dist
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import JoinTimeout
from elastic.tuning.worker_intervals import DISCOVERY_LOOK_S
from elastic.world.world import World, fresh_nonce


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
