"""How the ranks of a world meet at its store: all arrive, one is missing, or meshes differ."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from kit.assignments import assignment
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from elastic.errors import SYSTEM_CLOCK, ConfigError, GroupBuildFailed, Superseded
from elastic.groups.store import OpenStore, open_store, rendezvous
from elastic.link.link import Assignment

PATIENCE_S = 120.0


def never() -> None:
    """A check that never finds the world superseded."""


def spec(rank: int, size: int, port: int = 1) -> Assignment:
    return assignment(3, nonce="n", rank=rank, size=size, store_port=port)


@pytest.fixture
def port() -> Iterator[int]:
    """A port, reserved in the same way as by the agent."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


def meet_all(stores: list[Store], meshes: list[str]) -> list[BaseException | None]:
    """What each rank's call of ``rendezvous`` raises."""
    raised: list[BaseException | None] = [None] * len(stores)

    def enter(rank: int) -> None:
        by_s = SYSTEM_CLOCK.monotonic() + PATIENCE_S
        try:
            rendezvous(
                stores[rank],
                spec(rank, len(stores)),
                never,
                deadline_s=by_s,
                mesh=meshes[rank],
            )
        except Exception as error:  # noqa: BLE001  returned to the test
            raised[rank] = error

    threads = [threading.Thread(target=enter, args=(rank,)) for rank in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


@pytest.fixture
def three_stores(port: int) -> Iterator[list[Store]]:
    """The clients of one world's store, rank 0's first."""
    by_s = SYSTEM_CLOCK.monotonic() + PATIENCE_S
    with ExitStack() as opened:
        stores: list[OpenStore] = []
        for rank in range(3):
            given = spec(rank, 3, port)
            stores.append(open_store(given, never, deadline_s=by_s, use_tcp_store=False))
            opened.callback(stores[-1].close)
        yield [store.client for store in stores]


def test_ranks_with_the_same_mesh_all_arrive(three_stores: list[Store]) -> None:
    assert meet_all(three_stores, ["shard=2"] * 3) == [None] * 3


def test_a_rank_with_a_different_mesh_is_rejected_and_named(
    three_stores: list[Store],
) -> None:
    first, refused, other = meet_all(three_stores, ["shard=2", "", "shard=2"])
    assert isinstance(refused, ConfigError)
    assert "rank 1 has the dimensions none, but rank 0 has shard=2" in str(refused)
    for rank in (first, other):
        assert isinstance(rank, GroupBuildFailed)
        assert rank.missing == (1,)


def test_meshes_are_also_compared_in_a_torch_store() -> None:
    store = HashStore()
    first, refused = meet_all([store, store], ["shard=2", "shard=4"])
    assert isinstance(first, GroupBuildFailed) and isinstance(refused, ConfigError)


def test_a_rank_that_does_not_arrive_in_time_is_named(three_stores: list[Store]) -> None:
    three_stores[2].set("n/arrived/2", '""')
    with pytest.raises(GroupBuildFailed, match="did not join generation 3") as caught:
        rendezvous(three_stores[0], spec(0, 3), never, deadline_s=SYSTEM_CLOCK.monotonic() + 0.1)
    assert caught.value.missing == (1,)


def test_a_superseded_world_ends_the_wait(three_stores: list[Store]) -> None:
    def over() -> None:
        raise Superseded("generation 3 is over")

    with pytest.raises(Superseded):
        rendezvous(
            three_stores[1],
            spec(1, 3),
            over,
            deadline_s=SYSTEM_CLOCK.monotonic() + PATIENCE_S,
        )
