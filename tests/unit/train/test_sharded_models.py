"""Sharded models are rejected by name, at every entry point, before anything changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.run_kit import Job, job, network, parts_of, process
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from elastic.errors import ConfigError
from elastic.train.run import Run

INSTEAD = "docs/how-to/sharded.md"


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of a process group that the script created, as FSDP scripts do."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def run(mesh: DeviceMesh) -> Iterator[Run]:
    """A run in that process group."""
    with process(clean=False) as run:
        yield run


def fsdp2(mesh: DeviceMesh) -> nn.Module:
    module = network()
    fully_shard(module, mesh=mesh)
    return module


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(network(), mesh, {"0": ColwiseParallel()})


def fsdp1_inside(mesh: DeviceMesh) -> nn.Module:
    inner = FullyShardedDataParallel(
        nn.Linear(4, 4), mesh.get_group(), device_id=torch.device("cpu")
    )
    return nn.Sequential(nn.Linear(4, 4), inner)


def on_a_mesh(mesh: DeviceMesh) -> nn.Module:
    module = network()
    module.register_buffer("seen", distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    return module


def refused(message: str) -> Any:
    return pytest.raises(ConfigError, match=re.escape(message))


@pytest.mark.parametrize(
    ("shard", "place"),
    [
        (fsdp2, "'0.weight' is a DTensor (S(0) over DeviceMesh"),
        (tensor_parallel, "'0.weight' is a DTensor (S(0) over DeviceMesh"),
        (fsdp1_inside, "'1' is a FullyShardedDataParallel (FSDP1)"),
        (on_a_mesh, "'seen' is a DTensor (R over DeviceMesh"),
    ],
)
def test_wrap_and_track_name_the_sharded_part(
    run: Run, mesh: DeviceMesh, shard: Any, place: str
) -> None:
    module = shard(mesh)
    with refused(f"run.wrap() of a sharded module: {place}") as wrapped:
        run.wrap(module)
    with refused(f"run.track(ema=…) of a sharded module: {place}"):
        run.track(ema=module)
    text = str(wrapped.value)
    assert INSTEAD in text and "get_optimizer_state_dict(model, optimizer)" in text
    job = parts_of(run).session.job
    assert not job.modules and not job.tracked


def test_an_optimizer_over_sharded_parameters_is_rejected_by_name(
    run: Run, mesh: DeviceMesh
) -> None:
    module = fsdp2(mesh)
    with refused(
        "run.track(optimizer=…) of a sharded model's AdamW: its parameter '0.weight' is a"
    ):
        run.track(optimizer=torch.optim.AdamW(module.named_parameters()))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with refused(
        "run.track(o=…) of a sharded model's SGD: its parameter 0 of group 0 is a DTensor"
    ):
        run.track(o=optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with refused("run.track(scheduler=…) of a sharded model's SGD"):
        run.track(scheduler=scheduler)


def test_an_fsdp1_optimizer_is_rejected(run: Run, mesh: DeviceMesh) -> None:
    module = fsdp1_inside(mesh).get_submodule("1")
    with refused("is the flat parameter of a FullyShardedDataParallel (FSDP1)"):
        run.track(optimizer=torch.optim.SGD(module.parameters(), lr=0.1))


def test_an_optimizer_created_before_sharding_is_named(run: Run, mesh: DeviceMesh) -> None:
    module = network()
    run.track(optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    fully_shard(module, mesh=mesh)
    with refused("the optimizer tracked as 'optimizer' holds parameters of no wrapped module"):
        run.wrap(module)


@pytest.mark.parametrize("sharded", ["module", "wrapped"])
def test_sharding_after_wrap_is_rejected_before_the_first_step(
    run: Run, mesh: DeviceMesh, sharded: str
) -> None:
    script = job(run)
    fully_shard(script.model.module if sharded == "module" else script.model, mesh=mesh)
    with refused("the wrapped model was sharded after run.wrap: 'module.0.weight' is a") as error:
        script.train()
    assert "the optimizer tracked as 'optimizer'" in str(error.value)
    assert not parts_of(run).session.lifecycle.is_restored


def test_sharding_in_the_loop_is_rejected_at_the_next_optimizer_step(
    run: Run, mesh: DeviceMesh
) -> None:
    """The optimizer holds the old parameters, which receive no more gradients."""
    script = job(run)

    def shard_and_train(script: Job) -> None:
        for _ in run.epochs(1):
            for number, (x, y) in enumerate(script.loader):
                if number == 2:
                    fully_shard(script.model.module, mesh=mesh)
                script.update(x, y)

    with refused("the wrapped module was sharded after run.wrap: 'module.0.weight' is a DTensor"):
        shard_and_train(script)
    assert parts_of(run).session.job.progress.step == 2


def test_an_unwrapped_sharded_model_is_rejected_at_its_first_step(
    run: Run, mesh: DeviceMesh
) -> None:
    script, module = job(run), fsdp2(mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with refused("SGD.step() at step 0: its parameter 0 of group 0 is a DTensor"):
        for _ in run.epochs(1):
            for x, _ in script.loader:
                module(x).sum().backward()
                optimizer.step()


class AppState:
    """A sharded model's state, as in the tutorials of torch.distributed.checkpoint."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.module.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])


def test_sharded_state_of_a_tracked_object_is_rejected(run: Run, mesh: DeviceMesh) -> None:
    script = job(run)
    run.track(app=AppState(fsdp2(mesh)))
    with refused("the job's state is sharded: /tracked/app/model/0.weight is a DTensor"):
        script.train()
    with refused("the job's state is sharded"):  # what every save writes
        parts_of(run).session.job.tree()


def test_plain_models_train_although_a_mesh_exists(run: Run, mesh: DeviceMesh) -> None:
    assert job(run).train(1) > 0
