"""JSON values between ranks: one collective for short values, two for any length."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic.groups.collectives import OwnGroup, all_gather_json, broadcast_json
from elastic.groups.pending import PendingWorks
from elastic.testing.waiting import eventually

SIZE = 2
PATIENCE = datetime.timedelta(seconds=120)
LONG = "x" * 20_000


class CountedGroup(OwnGroup):
    """Counts its collectives."""

    begun = 0

    def broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work:
        self.begun += 1
        return super().broadcast(tensor, source)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> dist.Work:
        self.begun += 1
        return super().all_gather(outputs, tensor)


@pytest.fixture
def groups() -> Iterator[list[CountedGroup]]:
    """The ranks of one group, in threads; torch's default group determines their device."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with ThreadPoolExecutor(SIZE) as pool:

        def make(rank: int) -> CountedGroup:
            shared = dist.PrefixStore("g", store)  # type: ignore[attr-defined]
            return CountedGroup(dist.ProcessGroupGloo(shared, rank, SIZE, PATIENCE), PendingWorks())

        members = list(pool.map(make, range(SIZE)))
    yield members
    dist.destroy_process_group()


def on_each(groups: list[CountedGroup], call: Callable[[CountedGroup], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(call, groups))


@pytest.mark.parametrize(
    ("values", "collectives"),
    [(["a", {"b": [1]}], 1), (["", LONG], 2), ([LONG, LONG + "y"], 2)],
)
def test_values_of_any_length_are_gathered(
    groups: list[CountedGroup], values: list[Any], collectives: int
) -> None:
    got = on_each(groups, lambda group: all_gather_json(values[group.rank], group))
    assert got == [values] * SIZE
    assert [group.begun for group in groups] == [collectives] * SIZE


@pytest.mark.parametrize(("value", "collectives"), [({"a": None}, 1), (LONG, 2)])
def test_a_value_of_any_length_is_broadcast(
    groups: list[CountedGroup], value: Any, collectives: int
) -> None:
    def give(group: CountedGroup) -> Any:
        return broadcast_json(value if group.rank == 1 else "not mine", 1, group)

    assert on_each(groups, give) == [value] * SIZE
    assert [group.begun for group in groups] == [collectives] * SIZE


def test_the_main_thread_waits_without_a_gloo_callback(
    groups: list[CountedGroup],
) -> None:
    """Each callback would make a gloo thread take the GIL: 0.1 ms of CPU per collective."""
    callers: list[str] = []
    works = groups[0].works
    original_start = works.start

    def start(work: dist.Work, done: Any) -> None:
        callers.append(threading.current_thread().name)
        original_start(work, done)

    works.start = start  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        mine = torch.ones(1)
        work = groups[0].all_reduce(mine)
        pool.submit(groups[1].all_reduce, torch.ones(1)).result()
        eventually(lambda: work.is_completed() or None, "the collective has ended")
        works.wait(work)
        assert float(mine) == SIZE and callers == []
        pool.submit(works.wait, work).result()
        assert len(callers) == 1  # another thread may not wait for works of the main thread
        late = groups[0].all_reduce(mine)  # a longer collective is left to gloo's thread

        def join_late() -> dist.Work:
            eventually(lambda: len(callers) == 2 or None, "the main thread waits for a callback")
            return groups[1].all_reduce(torch.ones(1))

        theirs = pool.submit(join_late)
        works.wait(late)
        theirs.result().wait()
        assert float(mine) == SIZE + 1
    assert works.drain(60.0)
