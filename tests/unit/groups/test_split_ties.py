"""Tied weights that tensor parallelism splits into two parameters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from elastic.errors import ConfigError
from elastic.groups.replica import SplitTies

PLAN = {"embed": RowwiseParallel(), "head": ColwiseParallel(), "inner": ColwiseParallel()}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "tp"))
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(6, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def refusal(ties: SplitTies, module: nn.Module) -> str:
    with pytest.raises(ConfigError) as caught:
        ties.check(module)
    return f"{caught.value} {caught.value.hint}"


def test_a_weight_that_is_split_in_two_is_refused(mesh: DeviceMesh) -> None:
    ties = SplitTies()
    model = parallelize_module(Net(), mesh["tp"], PLAN)
    assert "'embed.weight' and 'head.weight' were one tied weight" in refusal(ties, model)
    assert "model.head.weight = model.embed.weight" in refusal(ties, model)
    fully_shard(model, mesh=mesh["shard"])
    assert "'embed.weight' and 'head.weight'" in refusal(ties, model)
    assert "one tied weight" in refusal(ties, distribute_module(Net(), mesh["tp"]))
    part = parallelize_module(Net(), mesh["tp"], {"head": ColwiseParallel()})
    assert "'embed.weight' and 'head.weight'" in refusal(ties, part)


def test_weights_that_are_tied_again_and_equal_ones_are_accepted(mesh: DeviceMesh) -> None:
    ties = SplitTies()
    model = parallelize_module(Net(), mesh["tp"], PLAN)
    model.head.weight = model.embed.weight  # type: ignore[union-attr]
    ties.check(model)
    fully_shard(model, mesh=mesh["shard"])
    ties.check(model)
    equal = Net()
    equal.head.weight = nn.Parameter(equal.embed.weight.detach().clone())
    ties.check(parallelize_module(equal, mesh["tp"], PLAN))
    fully_shard(sharded := Net(), mesh=mesh["shard"])
    ties.check(sharded)
