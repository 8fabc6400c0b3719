"""Gradients of sharded models across replicas: control flags, and the end of a world."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from twin_group import TwinGroup

from elastic.errors import GroupAborted
from elastic.groups.pending import PendingWorks
from elastic.groups.replica import ModelReplica
from elastic.train.order import COUNT, ControlFlags, StepFlags
from elastic.train.sharded import AcrossReduction, PartReduction


class BlockedWork(dist.Work):
    """A collective that has failed, or one that never completes."""

    def __init__(self, *, has_failed: bool) -> None:
        super().__init__()
        self._has_failed = has_failed

    def is_completed(self) -> bool:
        return self._has_failed

    def wait(self, timeout: object = None) -> bool:
        raise RuntimeError(
            "[gloo/transport/tcp/pair.cc:547] Connection closed by peer"
            if self._has_failed
            else "slice over"
        )


class BrokenGroup:
    """A group with a dead peer."""

    size = 2
    is_on_stream = False

    def __init__(self) -> None:
        self.works = PendingWorks()

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        return BlockedWork(has_failed=True)


def reduction_in(group: Any, flags: ControlFlags) -> AcrossReduction:
    made = AcrossReduction(ModelReplica())
    made.flags = flags
    made.enter_across(group)
    made.begin(1.0)
    return made


def weight(reduction: AcrossReduction, size: int = 3) -> torch.Tensor:
    """A parameter whose gradients are reduced as FSDP's are."""
    made = torch.ones(size, requires_grad=True)
    allocate = PartReduction(reduction, 1.0).allocate

    def reduced(gradient: torch.Tensor) -> torch.Tensor:
        shard = allocate((size,), dtype=gradient.dtype, device=gradient.device)
        reduction.reduce(shard.copy_(gradient))
        return shard

    made.register_hook(reduced)  # type: ignore[no-untyped-call]
    return made


def test_leaving_after_failed_gradients_ends_all_collectives() -> None:
    """Destroying the group would wait half an hour for a collective that never completes."""
    group = BrokenGroup()
    reduction = reduction_in(group, ControlFlags())
    with pytest.raises(RuntimeError, match="closed by peer"):
        weight(reduction).sum().backward()  # type: ignore[no-untyped-call]
    reduction.leave()
    assert group.works.drain(0.0)


def test_flags_are_piggybacked_on_the_first_gradients_without_a_collective() -> None:
    group, flags = TwinGroup(), ControlFlags()
    reduction = reduction_in(group, flags)
    weights = [weight(reduction, size) for size in (3, 4)]
    for step, sent in enumerate((StepFlags(save=True), StepFlags(), StepFlags(leaving=True))):
        group.sizes.clear()
        flags.begin_step(step)
        flags.send(sent)
        reduction.begin(1.0)
        for micro_batch in range(2):
            for each in weights:
                each.grad = None
            loss = torch.stack([w.sum() for w in weights]).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            assert all(w.grad is not None and w.grad.eq(1.0).all() for w in weights)
            assert flags.received() == sent, micro_batch
        flags.require_one_step(step)
        assert len(group.sizes) == 4
        assert sum(group.sizes) == 2 * (3 + 4) + COUNT


def test_a_world_is_left_although_the_script_caught_the_exception() -> None:
    """On all ranks of a replica, at the end of the backward pass, even if only one rank knows."""
    group = TwinGroup()
    with pytest.raises(RuntimeError, match="closed by peer"):
        group.works.finish_one(BlockedWork(has_failed=True))
    reduction = reduction_in(group, ControlFlags())
    with pytest.raises(GroupAborted):
        weight(reduction).sum().backward()  # type: ignore[no-untyped-call]
