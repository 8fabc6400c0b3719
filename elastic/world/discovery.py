"""How the workers of one start find each other in a store that outlives them.

torchrun's stock backends give every start of the workers the same store, and since torch 2.11 or
so nothing distinguishes the keys of two starts (``rendezvous.py`` documents that the
store is new for every retry; with c10d it is not). A worker then connects to the address of a
dead one: seen in one of three restarts with ``--standalone`` [measured, 2.13.0]. The restart count
does not help, since agents that joined at different times count differently.

So rank 0 offers a fresh nonce, the others answer it with a token each, and rank 0 closes the offer
when all have answered. An offer of a dead rank 0 is never closed for the token of a live rank; a
rank that answered it polls again. The nonce is the world's, and the prefix of all its keys.
"""

from __future__ import annotations

from typing import Protocol

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import JoinTimeout
from elastic.tuning.worker_intervals import DISCOVERY_LOOK_S
from elastic.world.world import fresh_nonce


class RendezvousStore(Protocol):
    """What this needs of torch.distributed's stores."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


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
        _look_again(deadline_s, clock, f"ranks {missing} have not arrived")
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
        _look_again(deadline_s, clock, "rank 0 has not arrived")


def _look_again(deadline_s: float, clock: Clock, lacking: str) -> None:
    if clock.monotonic() > deadline_s:
        raise JoinTimeout(
            f"the workers of this start did not find each other: {lacking}",
            hint="find the error of the missing rank",
        )
    clock.sleep(DISCOVERY_LOOK_S)
