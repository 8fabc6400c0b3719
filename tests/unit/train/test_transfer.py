"""The transfer of a state between ranks: complete, and only to ranks that lack it."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from elastic.errors import TrainingError
from elastic.groups.collectives import OwnGroup
from elastic.groups.pending import HOST, PendingWorks, Semantics
from elastic.train.transfer import (
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
    """Counts the bytes that this rank receives in broadcasts."""

    broadcast_bytes = 0

    def broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work:
        self.broadcast_bytes += tensor.numel() * tensor.element_size()
        return super().broadcast(tensor, source)


@pytest.fixture
def groups() -> Iterator[list[WatchedGroup]]:
    """The ranks of one group, in threads; torch's default group determines their device."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def make(rank: int) -> WatchedGroup:
        shared = dist.PrefixStore("g", store)  # type: ignore[attr-defined]
        return WatchedGroup(dist.ProcessGroupGloo(shared, rank, SIZE, PATIENCE), PendingWorks())

    with ThreadPoolExecutor(SIZE) as pool:
        members = list(pool.map(make, range(SIZE)))
    yield members
    dist.destroy_process_group()


def state() -> dict[str, torch.Tensor]:
    """Several chunks: a tensor that spans chunks, one that does not fit into the current chunk,
    one that is not contiguous, an empty one, and a scalar."""
    generator = torch.Generator().manual_seed(1)  # one per thread
    return {
        "first": torch.randn(200_000, generator=generator),
        "long": torch.randn(900_000, generator=generator),
        "turned": torch.randn(300, 200, generator=generator).t(),
        "second": torch.randn(150_000, generator=generator),
        "none": torch.empty(0),
        "short": torch.arange(7, dtype=torch.int16),
        "step": torch.tensor(3.5, dtype=torch.float64),
    }


def transferred(
    groups: list[WatchedGroup],
    sources: tuple[int, ...],
    receivers: tuple[int, ...],
    *,
    states: dict[int, dict[str, torch.Tensor]] | None = None,
    identical: tuple[str, ...] = (),
    room: Room | None = None,
) -> list[Transferred]:
    """The result of a transfer on each rank. ``states``: by source, :func:`state` by default."""

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
            identical=identical,
        )

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(take_part, groups))


def size_bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("identical", [(), ("first", "long", "turned", "step")])
@pytest.mark.parametrize(
    ("sources", "receivers"), [((1,), (2,)), ((1,), (0,)), ((1,), (0, 2)), ((1, 0), (2,))]
)
def test_receivers_get_the_complete_state_and_others_nothing(
    groups: list[WatchedGroup],
    sources: tuple[int, ...],
    receivers: tuple[int, ...],
    identical: tuple[str, ...],
) -> None:
    for rank, got in enumerate(transferred(groups, sources, receivers, identical=identical)):
        if rank not in receivers:
            assert (got.node, got.tensors) == (None, None)
            continue
        assert got.node == {"from": 1}
        assert got.tensors is not None and list(got.tensors) == list(state())
        for name, tensor in state().items():
            assert torch.equal(got.tensors[name], tensor)
            assert got.tensors[name].dtype == tensor.dtype


def test_the_state_is_sent_only_to_ranks_that_lack_it(groups: list[WatchedGroup]) -> None:
    """With three replicas, the second holder would receive it, too: half the bandwidth."""
    transferred(groups, (1,), (2,))
    assert all(group.broadcast_bytes < size_bytes(state()) / 10 for group in groups)


def test_sources_share_common_tensors_and_the_first_sends_the_rest(
    groups: list[WatchedGroup],
) -> None:
    states = {rank: {n: torch.full_like(t, rank) for n, t in state().items()} for rank in (0, 1)}
    zero, one, receiver = transferred(groups, (1, 0), (2,), states=states, identical=("long",))
    assert zero.sources == one.sources == receiver.sources == (0, 1)
    long = states[0]["long"].nbytes
    assert (zero.sent_bytes, one.sent_bytes) == (long // 2, size_bytes(state()) - long // 2)
    assert receiver.tensors is not None
    assert receiver.tensors["long"].sum() == len(states[0]["long"]) // 2
    assert all(tensor.eq(1).all() for n, tensor in receiver.tensors.items() if n != "long")


def test_a_source_with_different_tensors_sends_nothing(groups: list[WatchedGroup]) -> None:
    other = state() | {"long": torch.zeros(900_001)}
    zero, one, receiver = transferred(groups, (1, 0), (2,), states={0: other}, identical=("long",))
    assert one.sources == receiver.sources == (1,)
    assert (zero.sent_bytes, one.sent_bytes) == (0, size_bytes(state()))
    assert receiver.tensors is not None and torch.equal(receiver.tensors["long"], state()["long"])


@pytest.mark.parametrize(("at", "source"), [(0, 0), (-1, 1)])
def test_a_part_corrupted_in_transfer_is_rejected_with_its_source(
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
        transferred(groups, (1, 0), (2,), identical=("long",))


@pytest.mark.parametrize(
    ("sources", "receivers", "is_direct"),
    [(1, 1, True), (1, 2, True), (1, 3, False), (2, 8, True), (2, 9, False), (63, 1, True)],
)
def test_direct_sends_are_used_unless_a_broadcast_sends_less(
    sources: int, receivers: int, is_direct: bool
) -> None:
    ranks = range(sources + receivers)
    route = TransferRoute.choose(ranks[:sources], ranks[sources:], is_on_host=True)
    assert route.is_direct == is_direct
    assert len(route.sources) == (sources if is_direct else 1)
    on_stream = TransferRoute.choose(ranks[:sources], ranks[sources:], is_on_host=False)
    assert (on_stream.is_direct, on_stream.sources) == (False, (0,))


def test_matching_tensors_are_received_in_place(
    groups: list[WatchedGroup],
) -> None:
    own = {
        "long": torch.zeros(900_000),
        "first": torch.zeros(200_001),
        "turned": torch.zeros(200, 300).t(),  # same shape, another memory order
        "second": torch.zeros(150_000, dtype=torch.float64),
        "step": torch.zeros(2, dtype=torch.float64)[::2][0],
        "extra": torch.zeros(5),
    }
    asked: list[Any] = []

    def room(node: Any, specs: Specs) -> dict[str, torch.Tensor]:
        asked.append((node, set(specs)))
        return own

    tensors = transferred(groups, (1, 0), (2,), identical=("long",), room=room)[2].tensors
    assert asked == [({"from": 1}, set(state()))]  # only the receiver is asked
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
    """A collective that has failed, or one that never completes."""

    def __init__(self, *, has_failed: bool) -> None:
        super().__init__()
        self._has_failed = has_failed

    def is_completed(self) -> bool:
        return self._has_failed

    def wait(self, timeout: object = None) -> bool:
        raise RuntimeError("Connection closed by peer" if self._has_failed else "slice over")


class BrokenGroup:
    """A peer dies after one chunk has arrived, while the next is in flight."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.works = PendingWorks()
        self._sent = 0

    def semantics(self, device: torch.device) -> Semantics:
        return HOST

    def broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work:
        self._sent += 1
        return BlockedWork(has_failed=self._sent == 1)


@pytest.mark.usefixtures("groups")  # its device is used for control tensors
def test_a_chunk_in_flight_stays_pending_after_a_failure() -> None:
    """Destroying the group would wait for it."""
    group: Any = BrokenGroup()
    flat = {"long": torch.zeros(3 << 20, dtype=torch.uint8)}
    route = TransferRoute(first=0, sources=(0,), receivers=(1,), is_direct=False)
    chunks = ChunkedTransfer(flat, {"long": 3 << 20}, (), route, CPU, group)
    with pytest.raises(RuntimeError, match="closed by peer"):
        chunks.run()
    assert not group.works.drain(0.0)
