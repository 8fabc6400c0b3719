"""The test backend with NCCL's semantics, and the code that waits for its collectives."""

from __future__ import annotations

import datetime
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import device_stream, nccl_semantics
from kit.device_stream import POISON
from kit.nccl_semantics import StreamGroup, StreamWork, control
from torch.distributed import HashStore  # type: ignore[attr-defined]

from elastic.errors import GroupAborted
from elastic.groups import pending
from elastic.groups.pending import PendingWorks, open_works
from elastic.testing.waiting import eventually
from elastic.train.reduction import Reduction

DEADLINE_S = 60.0
ON_STREAM = nccl_semantics.SEMANTICS
TIMEOUT = datetime.timedelta(seconds=DEADLINE_S)


@pytest.fixture(autouse=True)
def reset_backend() -> Iterator[None]:
    """Reset the backend's settings after each test."""
    before = dict(vars(control))
    yield
    vars(control).update(before)
    control.calls.clear()
    device_stream.synchronize()
    open_works()


@pytest.fixture(params=[False, True], ids=["NCCL", "NCCL2"])
def groups(request: pytest.FixtureRequest) -> Iterator[tuple[StreamGroup, StreamGroup]]:
    """Both ranks of a world of two, in this process."""
    control.is_nccl2 = request.param
    store, made = HashStore(), {}

    def make(rank: int) -> None:
        made[rank] = StreamGroup(store, rank, 2, TIMEOUT)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    yield made[0], made[1]
    for group in made.values():
        control.hang_in_abort = False
        group.abort()


def reduce(group: StreamGroup, value: float) -> tuple[torch.Tensor, StreamWork]:
    tensor = torch.tensor([value])
    work = group.allreduce([tensor])
    assert isinstance(work, StreamWork)
    return tensor, work


# -- the backend ---------------------------------------------------------------------------------


def test_outputs_are_poisoned_until_the_result_arrives(groups: Any) -> None:
    tensor, work = reduce(groups[0], 1.0)
    size = torch.tensor([7])
    options = dist.BroadcastOptions()
    options.rootRank = 1
    groups[0].broadcast([size], options)
    assert math.isnan(tensor.item()) and size.item() == POISON
    assert not work.is_completed()
    reduce(groups[1], 2.0)
    groups[1].broadcast([torch.tensor([5])], options)
    eventually(work.is_completed)
    assert tensor.item() == 3.0
    eventually(lambda: size.item() == 5)


def test_wait_blocks_the_stream_and_not_the_host(groups: Any) -> None:
    control.latency_s = 0.2
    with device_stream.Kernels():  # type: ignore[no-untyped-call]
        tensor, work = reduce(groups[0], 1.0)
        reduce(groups[1], 2.0)
        assert work.wait()
        assert not work.is_completed() and math.isnan(tensor.tolist()[0]), "the host goes on"
        assert (tensor + 1).tolist() == [4.0], "what is queued behind it runs behind it"


def test_synchronize_covers_only_works_that_the_stream_waits_for(groups: Any) -> None:
    control.latency_s = 0.2
    tensor, work = reduce(groups[0], 1.0)
    reduce(groups[1], 2.0)
    device_stream.synchronize()
    assert math.isnan(tensor.item())
    work.wait()
    device_stream.synchronize()
    assert tensor.item() == 3.0


def test_futures_are_complete_from_the_start(groups: Any) -> None:
    tensor, work = reduce(groups[0], 1.0)
    (result,) = work.get_future().value()
    assert result is tensor and math.isnan(result.item())


def test_is_success_is_not_implemented(groups: Any) -> None:
    _, work = reduce(groups[0], 1.0)
    with pytest.raises(NotImplementedError):
        work.is_success()


def test_an_abort_completes_collectives_without_an_error(groups: Any) -> None:
    tensor, work = reduce(groups[0], 1.0)  # the other rank does not join
    _, behind = reduce(groups[0], 1.0)
    assert not work.is_completed()
    groups[0].abort()
    eventually(behind.is_completed)
    assert work.is_completed() and work.wait()
    assert tensor.item() == 1.0, "not reduced"
    with pytest.raises(dist.DistBackendError, match="aborted"):
        reduce(groups[0], 1.0)


def test_a_dead_peer_is_not_detected(groups: Any) -> None:
    _, work = reduce(groups[0], 1.0)
    groups[1].abort()
    del groups
    time.sleep(0.1)
    assert not work.is_completed()


def test_a_dead_peer_that_the_network_reports_is_a_communicator_error(groups: Any) -> None:
    control.async_error = True
    tensor, work = reduce(groups[0], 1.0)
    groups[1]._gloo.abort()
    groups[1].abort()
    groups[0].async_error = dist.DistBackendError("remote process exited")
    assert work.exception() is None, "nobody has looked"
    assert work.is_completed() and math.isnan(tensor.item())
    assert isinstance(work.exception(), dist.DistBackendError)
    with pytest.raises(dist.DistBackendError):
        work.wait()
    assert groups[0].is_aborted, "torch has aborted it first"


def test_a_late_peer_is_not_a_dead_one(groups: Any) -> None:
    """The timeout is that of the construction; no collective of NCCL ends by it."""
    assert all(group._gloo.options._timeout > 100 * TIMEOUT for group in groups)


def test_an_abort_can_hang(groups: Any) -> None:
    control.hang_in_abort = True
    _, work = reduce(groups[0], 1.0)
    thread = threading.Thread(target=groups[0].abort)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and not work.landed.is_set()
    control.hang_in_abort = False
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


# -- waiting code --------------------------------------------------------------------------------


def test_gradients_of_an_aborted_group_do_not_reach_the_optimizer(groups: Any) -> None:
    """The collective has completed without an error; only the abort shows that there is no sum."""
    reduction = Reduction()
    works = open_works(ON_STREAM)
    _, work = reduce(groups[0], 1.0)
    reduction.works.append(work)
    works.abort()
    groups[0].abort()
    eventually(work.is_completed)
    with pytest.raises(GroupAborted):
        reduction.wait()


def test_reduced_gradients_reach_the_optimizer(groups: Any) -> None:
    reduction = Reduction()
    open_works(ON_STREAM)
    control.latency_s = 0.1
    tensor, work = reduce(groups[0], 1.0)
    reduction.works.append(work)
    reduce(groups[1], 2.0)
    reduction.wait()
    assert tensor.item() == 3.0 and not reduction.works


def test_an_abort_ends_the_wait_for_gradients(groups: Any) -> None:
    reduction = Reduction()
    works = open_works(ON_STREAM)
    reduction.works.append(reduce(groups[0], 1.0)[1])
    threading.Timer(0.05, works.abort).start()
    with pytest.raises(GroupAborted):
        reduction.wait()


def test_a_communicator_error_aborts_the_group_before_it_is_raised(groups: Any) -> None:
    """Work.wait would abort the communicator itself, unannounced and without a deadline."""
    aborted_by_torch: list[bool] = []
    works = open_works(ON_STREAM, on_error=lambda: aborted_by_torch.append(groups[0].is_aborted))
    _, work = reduce(groups[0], 1.0)
    groups[0].async_error = dist.DistBackendError("remote process exited")
    with pytest.raises(dist.DistBackendError, match="remote process exited"):
        works.finish_on_stream(work)
    assert aborted_by_torch == [False]
    with pytest.raises(GroupAborted):
        works.raise_failure()


def test_works_of_an_aborted_group_are_not_queried(groups: Any) -> None:
    """The query would block with the GIL held, while the abort hangs."""
    works = open_works(ON_STREAM)
    _, work = reduce(groups[0], 1.0)
    looks: list[None] = []

    def is_completed() -> bool:
        looks.append(None)
        return False

    work.is_completed = is_completed  # type: ignore[method-assign]
    works.abort()
    for look in (works.finish_on_stream, works.queue):
        with pytest.raises(GroupAborted):
            look(work)
    assert not looks


def test_a_result_counts_once_its_collective_has_completed(groups: Any) -> None:
    own = PendingWorks(is_on_stream=True)
    control.latency_s = 0.1
    tensor, work = reduce(groups[0], 1.0)
    reduce(groups[1], 2.0)
    own.queue(work)
    assert not work.is_completed()
    own.synchronize()
    assert tensor.item() == 3.0
    own.abort()
    with pytest.raises(GroupAborted):
        own.synchronize()


def test_a_script_waits_through_the_patched_wait(groups: Any) -> None:
    """torch's own wait is called by the package below: the test double must recognise it."""
    pending.release_waits()
    works = open_works(ON_STREAM)
    tensor, work = reduce(groups[0], 1.0)
    reduce(groups[1], 2.0)
    try:
        assert work.wait()
    finally:
        pending.restore_waits()
    works.synchronize()
    assert tensor.item() == 3.0
