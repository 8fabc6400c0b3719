"""Gradients of pipeline stages: summed when the script calls for it, with one set of flags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from twin_group import TwinGroup

from elastic.errors import TrainingError
from elastic.groups.replica import ModelReplica
from elastic.groups.world import ReplicaMesh
from elastic.train.order import COUNT, ControlFlags, StepFlags
from elastic.train.sharded import StageReduction, reduce_stages

ONE_STAGE = ReplicaMesh.parse({"pp": 1})


class Rank:
    """A rank of the first of two replicas."""

    def __init__(self, *modules: nn.Module) -> None:
        self.group, self.flags = TwinGroup(), ControlFlags()
        self.reductions = [
            StageReduction(ModelReplica(ONE_STAGE), module.parameters, has_fsdp=False)
            for module in modules
        ]
        self.reductions[0].flags = self.flags
        for reduction in self.reductions:
            group: Any = self.group
            reduction.enter_across(group)
        self.begin(0)

    def begin(self, step: int, *, weight: float = 0.5, sent: StepFlags | None = None) -> None:
        self.flags.begin_step(step, 2)
        self.flags.send(sent or StepFlags())
        for reduction in self.reductions:
            reduction.begin(weight)

    def may_step(self) -> bool:
        return all(reduction.is_complete for reduction in self.reductions)

    def holds_unweighted(self) -> bool:
        return any(reduction.holds_unweighted for reduction in self.reductions)

    def train(self, module: nn.Module, index: int = 0) -> None:
        self.reductions[index].forward_begins()
        module(torch.ones(2, 3)).sum().backward()


def gradient_of(parameter: nn.Parameter) -> list[float] | None:
    return None if parameter.grad is None else parameter.grad.tolist()


def test_passes_accumulate_until_they_are_summed_once() -> None:
    module = nn.Linear(3, 1)
    rank = Rank(module)
    for _ in range(3):
        rank.train(module)
    assert rank.group.sizes == []
    assert not rank.may_step()
    assert rank.reductions[0].has_new_gradients
    reduce_stages(rank.reductions)
    assert rank.may_step()
    assert rank.group.sizes == [4 + 2 + COUNT]  # and which of the two parameters have gradients
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[6.0, 6.0, 6.0]]  # 3 passes × 2 samples × 0.5 × 2
    rank.flags.require_one_step(0)


def test_a_pass_after_the_sum_is_not_used_before_it_is_summed_too() -> None:
    module = nn.Linear(3, 1)
    rank = Rank(module)
    rank.train(module)
    reduce_stages(rank.reductions)
    rank.train(module)
    assert not rank.may_step()
    for _ in range(2):
        reduce_stages(rank.reductions)
        assert rank.may_step()
        assert module.weight.grad is not None
        assert module.weight.grad.tolist() == [[4.0, 4.0, 4.0]]  # 2 passes × 2 samples


def test_without_gradients_nothing_is_summed() -> None:
    rank = Rank(nn.Linear(3, 1))
    with pytest.raises(TrainingError, match="without gradients: no backward pass has run"):
        reduce_stages(rank.reductions)
    assert rank.group.sizes == []


def test_a_missing_gradient_is_created_if_the_other_replica_has_one() -> None:
    for other in (1.0, 0.0):
        module = nn.Linear(3, 1)
        rank = Rank(module)
        rank.train(module)
        module.bias.grad = None
        rank.group.others = torch.tensor([8.0, 8.0, 8.0, 5.0 * other, 1.0, other])
        reduce_stages(rank.reductions)
        assert module.weight.grad is not None
        assert module.weight.grad.tolist() == [[9.0, 9.0, 9.0]]
        assert gradient_of(module.bias) == ([5.0] if other else None)


def test_flags_are_sent_once_although_the_first_module_has_no_gradients() -> None:
    first, second = nn.Linear(3, 1), nn.Linear(3, 2)
    rank = Rank(first, second)
    rank.begin(1, sent=StepFlags(save=True))
    rank.train(second, 1)
    reduce_stages(rank.reductions)
    assert rank.group.sizes == [4 + 2 + COUNT, 8 + 2]  # another replica may have gradients
    assert rank.flags.received() == StepFlags(save=True)
    rank.flags.require_one_step(1)
    assert first.weight.grad is None


def test_a_rank_without_samples_contributes_nothing() -> None:
    """Neither a value nor that there is a gradient."""
    module = nn.Linear(3, 1)
    rank = Rank(module)
    rank.begin(0, weight=0.0)
    rank.train(module)
    rank.group.others = torch.tensor([8.0, 8.0, 8.0, 0.0, 1.0, 0.0])
    reduce_stages(rank.reductions)
    assert module.weight.grad is not None
    assert module.weight.grad.tolist() == [[8.0, 8.0, 8.0]]
    assert module.bias.grad is None


def test_a_failure_is_raised_for_all_modules_at_the_end() -> None:
    first, second = nn.Linear(3, 1), nn.Linear(3, 2)
    rank = Rank(first, second)
    rank.train(first, 0)
    rank.train(second, 1)
    rank.group.is_broken = True
    with pytest.raises(RuntimeError, match="closed by peer"):
        reduce_stages(rank.reductions)
    assert [type(each.failure) for each in rank.reductions] == [RuntimeError, RuntimeError]


def test_gradients_of_several_steps_need_equal_shares() -> None:
    """They are multiplied by one share, at the end."""
    module = nn.Linear(3, 1)
    rank = Rank(module)
    assert not rank.holds_unweighted()
    rank.train(module)
    assert rank.holds_unweighted()
    reduce_stages(rank.reductions)
    assert not rank.holds_unweighted()
