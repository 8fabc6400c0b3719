"""Gradients of sharded models across replicas, when a collective of the world fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from elastic.mesh import ModelReplica
from elastic.process_group import PendingWorks
from elastic.training.gradients.across import AcrossReduction


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
    """A peer is gone: the all-reduce of flags never returns, and the one of gradients fails."""

    size = 2

    def __init__(self) -> None:
        self.works = PendingWorks()
        self.begun = 0

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        self.begun += 1
        return BlockedWork(has_failed=self.begun == 2)


def test_flags_on_their_way_when_gradients_fail_are_not_forgotten() -> None:
    """To destroy the group would wait for them until its timeout, half an hour."""
    group = BrokenGroup()
    reduction = AcrossReduction(ModelReplica())
    reduction.flags = cast(Any, SimpleNamespace(write=lambda end: None, forget=lambda: None))
    reduction.enter_across(cast(Any, group))
    reduction.begin(1.0)
    weight = torch.ones(3, requires_grad=True)
    each: Any = weight.register_hook
    each(lambda gradient: reduction.reduce(gradient.clone()))
    with pytest.raises(RuntimeError, match="closed by peer"):
        weight.sum().backward()  # type: ignore[no-untyped-call]
    reduction.leave()
    assert group.begun == 2
    assert not group.works.drain(0.0)
