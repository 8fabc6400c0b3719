"""Collectives that the host does not wait for, such as ``dist.all_reduce(t)`` on NCCL."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from kit import device_stream, nccl_semantics
from kit.assignments import assignment
from kit.device_stream import SimulatedEvent
from kit.nccl_semantics import control
from torch.distributed import distributed_c10d

from elastic.errors import GroupAborted
from elastic.groups import pending
from elastic.groups.collectives import complete
from elastic.groups.group import ProcessGroup
from elastic.groups.pending import open_works, pending_works
from elastic.hangs.page import PageReader, Phase, PhaseRecorder

DEADLINE_S = 60.0
NEVER_S = 1000.0
CPU = torch.device("cpu")
SPEC = assignment()


@pytest.fixture(params=[False, True], ids=["NCCL", "NCCL2"])
def group(request: pytest.FixtureRequest) -> Iterator[ProcessGroup]:
    """A world of one on the backend with NCCL's semantics."""
    before = dict(vars(control))
    control.is_nccl2 = request.param
    process_group = ProcessGroup(torch.device("cpu"), nccl_semantics.register())
    process_group.build(SPEC, superseded=lambda: False, timeout_s=DEADLINE_S)
    yield process_group
    vars(control).update(before)
    control.calls.clear()
    process_group.abort()
    process_group.destroy()
    open_works()


def test_a_synchronous_collective_returns_before_it_has_ended(group: ProcessGroup) -> None:
    control.latency_s = 0.2
    tensor = torch.ones(1)
    assert dist.all_reduce(tensor) is None
    assert math.isnan(tensor.tolist()[0])
    with device_stream.Kernels():  # type: ignore[no-untyped-call]
        assert (tensor + 1).tolist() == [2.0], "what is queued behind it runs behind it"


def test_a_step_synchronizes_when_its_collectives_have_ended(group: ProcessGroup) -> None:
    control.latency_s = 0.2
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    group.synchronize()
    assert tensor.item() == 1.0


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather", "reduce_scatter"])
def test_a_step_does_not_synchronize_after_an_abort(group: ProcessGroup, collective: str) -> None:
    control.latency_s = NEVER_S
    tensor, into = torch.ones(1), torch.zeros(1)
    match collective:
        case "all_reduce":
            dist.all_reduce(tensor)
        case "broadcast":
            dist.broadcast(tensor, 0)
        case "all_gather":
            dist.all_gather_into_tensor(into, tensor)
        case "reduce_scatter":
            dist.reduce_scatter_tensor(into, tensor)
    threading.Timer(0.1, group.abort).start()
    with pytest.raises(GroupAborted):
        group.synchronize()


def test_a_step_waits_for_collectives_of_subgroups(group: ProcessGroup) -> None:
    mine = dist.new_group([0])
    group.synchronize()
    control.latency_s = NEVER_S
    dist.all_reduce(torch.ones(1), group=mine)
    threading.Timer(0.1, group.abort).start()
    with pytest.raises(GroupAborted):
        group.synchronize()


def test_a_step_does_not_synchronize_after_an_aborted_barrier(group: ProcessGroup) -> None:
    control.latency_s = NEVER_S
    threading.Timer(0.1, group.abort).start()
    assert dist.barrier() is None
    with pytest.raises(GroupAborted):
        group.synchronize()


def test_a_step_waits_for_coalesced_operations(group: ProcessGroup) -> None:
    """As ``dist.batch_isend_irecv`` starts them. Their work has no future: NCCL's is a null
    pointer, and accessing it crashes the process."""
    outputs = [torch.ones(1), torch.ones(2)]
    with distributed_c10d._coalescing_manager(device=CPU, async_ops=True) as manager:
        for output in outputs:
            dist.all_to_all_single(output, output.clone())
    (work,) = manager.works
    work.wait()
    group.synchronize()
    assert [output.tolist() for output in outputs] == [[1.0], [1.0, 1.0]]


def test_an_abort_ends_a_barrier_on_the_host(group: ProcessGroup) -> None:
    """ProcessGroupNCCL2 returns a work for it. Querying its future would hold the GIL until the
    barrier ends, so that no other thread could abort it."""
    control.latency_s = NEVER_S
    threading.Timer(0.1, group.abort).start()
    work = dist.barrier(async_op=True)
    assert work is not None
    with pytest.raises(GroupAborted):
        work.wait()
        group.synchronize()


def test_a_wait_is_not_repeated(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """No event is recorded for it, so that the optimizer's kernels run asynchronously."""
    tensor = torch.ones(1)
    complete(dist.all_reduce(tensor, async_op=True), tensor.device)
    events: list[None] = []
    record = pending_works()._record
    assert record is not None

    def recording() -> SimulatedEvent:
        events.append(None)
        return device_stream.record()

    monkeypatch.setattr(pending_works(), "_record", recording)
    group.synchronize()
    assert not events
    dist.all_reduce(tensor)
    group.synchronize()
    group.synchronize()
    assert len(events) == 1


def test_collectives_are_counted_while_the_main_thread_is_blocked(
    group: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = PhaseRecorder()
    monkeypatch.setattr(pending, "phases", recorder)
    reader = PageReader(os.getpid(), recorder.start())
    recorder.enter(Phase.SCRIPT)
    count = _collective(reader)
    dist.all_reduce(torch.ones(1))
    assert _collective(reader) == count
    thread = threading.Thread(target=group.report_collectives)  # the link's thread
    thread.start()
    thread.join()
    assert _collective(reader) == 1
    recorder.enter(Phase.COMPUTE)
    assert _collective(reader) == 1
    reader.close()


def _collective(reader: PageReader) -> int:
    reading = reader.read()
    assert reading is not None
    return reading.collective
