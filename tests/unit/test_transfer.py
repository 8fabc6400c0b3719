"""A state's way from the ranks that have it to others: whole, and to nobody that has it."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from elastic.errors import TrainingError
from elastic.process_group import OwnGroup, PendingWorks
from elastic.training.recovery.transfer import (
    ChunkedTransfer,
    Room,
    SentChunk,
    Specs,
    Transferred,
    TransferRoute,
    transfer,
)

SIZE = 3
PATIENCE = datetime.timedelta(seconds=120)
CPU = torch.device("cpu")


class WatchedGroup(OwnGroup):
    """Adds up the bytes that this rank is given by broadcasts."""

    broadcast_bytes = 0

    def broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work:
        self.broadcast_bytes += tensor.numel() * tensor.element_size()
        return super().broadcast(tensor, source)


@pytest.fixture
def groups() -> Iterator[list[WatchedGroup]]:
    """The ranks of one group, in threads; torch's default group says which device they use."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def make(rank: int) -> WatchedGroup:
        shared = dist.PrefixStore("g", store)  # type: ignore[attr-defined]
        return WatchedGroup(dist.ProcessGroupGloo(shared, rank, SIZE, PATIENCE), PendingWorks())

    with ThreadPoolExecutor(SIZE) as pool:
        made = list(pool.map(make, range(SIZE)))
    yield made
    dist.destroy_process_group()


def state() -> dict[str, torch.Tensor]:
    """Several chunks, one tensor that spans them, one that no longer fits into the chunk of those
    before it, one that is not contiguous, one that is empty, and a scalar."""
    chance = torch.Generator().manual_seed(1)  # each thread its own
    return {
        "first": torch.randn(200_000, generator=chance),
        "long": torch.randn(900_000, generator=chance),
        "turned": torch.randn(300, 200, generator=chance).t(),
        "second": torch.randn(150_000, generator=chance),
        "none": torch.empty(0),
        "short": torch.arange(7, dtype=torch.int16),
        "step": torch.tensor(3.5, dtype=torch.float64),
    }


def moved(
    groups: list[WatchedGroup],
    sources: tuple[int, ...],
    receivers: tuple[int, ...],
    *,
    states: dict[int, dict[str, torch.Tensor]] | None = None,
    alike: tuple[str, ...] = (),
    room: Room | None = None,
) -> list[Transferred]:
    """What each rank has of a transfer. ``states``: of sources, :func:`state` of all by default."""

    def take_part(group: WatchedGroup) -> Transferred:
        rank = group.rank
        tensors = (states or {}).get(rank, state()) if rank in sources else {}
        return transfer(
            {"from": rank},
            tensors,
            sources=sources,
            receivers=receivers,
            device=CPU,
            group=group,
            room=room,
            alike=alike,
        )

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(take_part, groups))


def size_bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("alike", [(), ("first", "long", "turned", "step")])
@pytest.mark.parametrize(
    ("sources", "receivers"), [((1,), (2,)), ((1,), (0,)), ((1,), (0, 2)), ((1, 0), (2,))]
)
def test_receivers_get_all_of_it_and_others_nothing(
    groups: list[WatchedGroup],
    sources: tuple[int, ...],
    receivers: tuple[int, ...],
    alike: tuple[str, ...],
) -> None:
    for rank, got in enumerate(moved(groups, sources, receivers, alike=alike)):
        if rank not in receivers:
            assert (got.node, got.tensors) == (None, None)
            continue
        assert got.node == {"from": 1}
        assert got.tensors is not None and list(got.tensors) == list(state())
        for name, tensor in state().items():
            assert torch.equal(got.tensors[name], tensor)
            assert got.tensors[name].dtype == tensor.dtype


def test_what_one_rank_lacks_is_sent_to_no_other(groups: list[WatchedGroup]) -> None:
    """Of three replicas, the second that has the state was sent it, too: half the bandwidth."""
    moved(groups, (1,), (2,))
    assert all(group.broadcast_bytes < size_bytes(state()) / 10 for group in groups)


def test_each_source_sends_a_part_of_what_they_hold_alike_and_the_first_one_the_rest(
    groups: list[WatchedGroup],
) -> None:
    states = {rank: {n: torch.full_like(t, rank) for n, t in state().items()} for rank in (0, 1)}
    zero, one, receiver = moved(groups, (1, 0), (2,), states=states, alike=("long",))
    assert zero.sources == one.sources == receiver.sources == (0, 1)
    long = states[0]["long"].nbytes
    assert (zero.sent_bytes, one.sent_bytes) == (long // 2, size_bytes(state()) - long // 2)
    assert receiver.tensors is not None
    assert receiver.tensors["long"].sum() == len(states[0]["long"]) // 2
    assert all(tensor.eq(1).all() for n, tensor in receiver.tensors.items() if n != "long")


def test_a_source_whose_tensors_are_others_sends_nothing(groups: list[WatchedGroup]) -> None:
    other = state() | {"long": torch.zeros(900_001)}
    zero, one, receiver = moved(groups, (1, 0), (2,), states={0: other}, alike=("long",))
    assert one.sources == receiver.sources == (1,)
    assert (zero.sent_bytes, one.sent_bytes) == (0, size_bytes(state()))
    assert receiver.tensors is not None and torch.equal(receiver.tensors["long"], state()["long"])


@pytest.mark.parametrize(("at", "source"), [(0, 0), (-1, 1)])
def test_a_part_that_was_damaged_on_its_way_is_refused_with_the_rank_that_sent_it(
    groups: list[WatchedGroup], monkeypatch: pytest.MonkeyPatch, at: int, source: int
) -> None:
    finish = ChunkedTransfer.finish_chunk

    def damage(self: ChunkedTransfer, sent: SentChunk) -> None:
        if groups[2] is self._group and "long" in sent.pieces[0]:
            groups[2].works.finish_one(cast(dist.Work, sent.work))
            sent.memory[at] ^= 1
            sent = sent._replace(work=None)
        finish(self, sent)

    monkeypatch.setattr(ChunkedTransfer, "finish_chunk", damage)
    with pytest.raises(TrainingError, match=f"sent by rank {source} was corrupted in transfer"):
        moved(groups, (1, 0), (2,), alike=("long",))


@pytest.mark.parametrize(
    ("sources", "receivers", "is_direct"),
    [(1, 1, True), (1, 2, True), (1, 3, False), (2, 8, True), (2, 9, False), (63, 1, True)],
)
def test_sources_send_to_each_receiver_unless_a_broadcast_has_them_send_less(
    sources: int, receivers: int, is_direct: bool
) -> None:
    ranks = range(sources + receivers)
    route = TransferRoute.choose(ranks[:sources], ranks[sources:], is_on_host=True)
    assert route.is_direct == is_direct
    assert len(route.sources) == (sources if is_direct else 1)
    on_stream = TransferRoute.choose(ranks[:sources], ranks[sources:], is_on_host=False)
    assert (on_stream.is_direct, on_stream.sources) == (False, (0,))


def test_a_receiver_gets_into_its_own_memory_what_is_like_the_source_s(
    groups: list[WatchedGroup],
) -> None:
    own = {
        "long": torch.zeros(900_000),
        "first": torch.zeros(200_001),
        "turned": torch.zeros(200, 300).t(),  # of the same shape, in another order
        "second": torch.zeros(150_000, dtype=torch.float64),
        "step": torch.zeros(2, dtype=torch.float64)[::2][0],
        "extra": torch.zeros(5),
    }
    asked: list[Any] = []

    def room(node: Any, specs: Specs) -> dict[str, torch.Tensor]:
        asked.append((node, set(specs)))
        return own

    tensors = moved(groups, (1, 0), (2,), alike=("long",), room=room)[2].tensors
    assert asked == [({"from": 1}, set(state()))]  # of the receiver only
    assert tensors is not None
    for name, tensor in state().items():
        assert torch.equal(tensors[name], tensor) and tensors[name].dtype == tensor.dtype
    assert {n for n in own if n in tensors and tensors[n].data_ptr() == own[n].data_ptr()} == {
        "long",
        "step",
    }
    assert torch.equal(own["long"], state()["long"])
    assert not any(own[name].any() for name in ("first", "turned", "second", "extra"))


class BlockedWork(dist.Work):
    """A collective that has failed, or one that never comes back."""

    def __init__(self, *, has_failed: bool) -> None:
        super().__init__()
        self._has_failed = has_failed

    def is_completed(self) -> bool:
        return self._has_failed

    def wait(self, timeout: object = None) -> bool:
        raise RuntimeError("Connection closed by peer" if self._has_failed else "slice over")


class BrokenGroup:
    """A peer dies while one chunk has arrived and the next one is on its way."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.works = PendingWorks()
        self._sent = 0

    def broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work:
        self._sent += 1
        return BlockedWork(has_failed=self._sent == 1)


@pytest.mark.usefixtures("groups")  # torch's default group says where control tensors live
def test_a_chunk_on_its_way_when_the_one_before_fails_is_not_forgotten() -> None:
    """To destroy the group would wait for it."""
    group: Any = BrokenGroup()
    flat = {"long": torch.zeros(3 << 20, dtype=torch.uint8)}
    route = TransferRoute(first=0, sources=(0,), receivers=(1,), is_direct=False)
    chunks = ChunkedTransfer(flat, {"long": 3 << 20}, (), route, CPU, group)
    with pytest.raises(RuntimeError, match="closed by peer"):
        chunks.run()
    assert not group.works.drain(0.0)
