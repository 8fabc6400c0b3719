"""Process groups and handles that a script keeps beyond the end of their world."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from elastic import torch_private
from elastic.errors import TrainingError
from elastic.groups import pending
from elastic.groups.faults import is_world_fault


@pytest.fixture
def groups() -> Iterator[list[dist.ProcessGroup]]:
    """A group of a world that has ended, and one of the next."""
    found = []
    for _ in range(2):
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        own = dist.new_group([0])
        assert isinstance(own, dist.ProcessGroup)
        found.append(own)
        if len(found) == 1:
            pending.have_ended(torch_private.groups(), "in generation 1 on rank 0 of 1")
            dist.destroy_process_group()
    yield found
    dist.destroy_process_group()


def error_of(group: dist.ProcessGroup) -> Exception:
    with pytest.raises(ValueError, match=r"is not initialized|not registered|destroyed") as raised:
        dist.broadcast_object_list([None], src=0, group=group)
    return raised.value


def test_a_collective_of_an_ended_world_is_an_error_of_the_script(
    groups: list[dist.ProcessGroup],
) -> None:
    error = error_of(groups[0])
    assert pending.uses_stale_group(error)
    message = "uses a process group of 1 ranks that was created in generation 1 on rank 0 of 1"
    with pytest.raises(TrainingError, match=re.escape(message)) as raised:
        pending.refuse_stale_group(error)
    assert __file__ in str(raised.value)
    try:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:5] Connection closed by peer")
    except RuntimeError as closed:
        error.__context__ = closed
    assert is_world_fault(error) and pending.uses_stale_group(error)
    assert not is_world_fault(raised.value)


def test_collectives_of_the_current_world_are_not_refused(groups: list[dist.ProcessGroup]) -> None:
    dist.all_reduce(torch.ones(1), group=groups[1])
    with pytest.raises(ValueError) as raised:
        dist.broadcast(torch.ones(1), src=7, group=groups[1])
    assert not pending.uses_stale_group(raised.value)
    pending.refuse_stale_group(raised.value)


def test_a_handle_that_has_failed_in_an_earlier_world_is_refused(
    groups: list[dist.ProcessGroup],
) -> None:
    class World:
        pass

    first, second = World(), World()
    work = dist.all_reduce(torch.ones(1), group=groups[1], async_op=True)
    assert work is not None
    pending.refuse_stale_handle(work, first)
    pending.handle_failed(work, first)
    pending.refuse_stale_handle(work, first)  # in a `finally` of the script
    with pytest.raises(TrainingError, match="has failed in an earlier world"):
        pending.refuse_stale_handle(work, second)
