"""A state's way from one rank to others: whole, and to nobody that has it."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic.process_group import OwnGroup, PendingWorks
from elastic.training.recovery.transfer import ChunkedBroadcast, Specs, transfer

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
    torch.manual_seed(1)
    return {
        "first": torch.randn(200_000),
        "long": torch.randn(900_000),
        "turned": torch.randn(300, 200).t(),
        "second": torch.randn(150_000),
        "none": torch.empty(0),
        "short": torch.arange(7, dtype=torch.int16),
        "step": torch.tensor(3.5, dtype=torch.float64),
    }


def moved(groups: list[WatchedGroup], source: int, receivers: tuple[int, ...]) -> list[Any]:
    def take_part(group: WatchedGroup) -> Any:
        node, tensors = ({"n": 1}, state()) if group.rank == source else (None, {})
        return transfer(node, tensors, source=source, receivers=receivers, device=CPU, group=group)

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(take_part, groups))


@pytest.mark.parametrize("receivers", [(2,), (0,), (0, 2)])
def test_receivers_get_all_of_it_and_others_nothing(
    groups: list[WatchedGroup], receivers: tuple[int, ...]
) -> None:
    got = moved(groups, 1, receivers)
    for rank, result in enumerate(got):
        if rank not in receivers:
            assert result is None
            continue
        node, tensors = result
        assert node == {"n": 1}
        assert list(tensors) == list(state())
        for name, tensor in state().items():
            assert torch.equal(tensors[name], tensor) and tensors[name].dtype == tensor.dtype


def test_what_one_rank_lacks_is_sent_to_no_other(groups: list[WatchedGroup]) -> None:
    """Of three replicas, the second that has the state was sent it, too: half the bandwidth."""
    moved(groups, 1, (2,))
    size_bytes = sum(t.numel() * t.element_size() for t in state().values())
    assert all(group.broadcast_bytes < size_bytes / 10 for group in groups)


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

    def take_part(group: WatchedGroup) -> Any:
        node, tensors = ({"n": 1}, state()) if group.rank == 1 else (None, {})
        return transfer(node, tensors, source=1, receivers=(2,), device=CPU, group=group, room=room)

    with ThreadPoolExecutor(SIZE) as pool:
        _, tensors = list(pool.map(take_part, groups))[2]
    assert asked == [({"n": 1}, set(state()))]  # of the receiver only
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
    broadcast = ChunkedBroadcast(flat, {"long": 3 << 20}, 0, None, CPU, group)
    with pytest.raises(RuntimeError, match="closed by peer"):
        broadcast.run()
    assert not group.works.drain(0.0)
