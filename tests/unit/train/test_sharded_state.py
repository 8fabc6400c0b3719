"""The state of a sharded model on one rank: sent, copied and read as shards of this rank."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import checkpoints
from checkpoints import CheckpointError
from checkpoints.commit import read_manifest
from checkpoints.objects import storage_for
from checkpoints.tensors import local_of
from elastic.errors import ConfigError, TrainingError
from elastic.groups.replica import ModelReplica, ReplicaProcessGroup
from elastic.groups.world import ReplicaMesh
from elastic.train import shards
from elastic.train.copies import WeightCopies
from elastic.train.current import CurrentStep
from elastic.train.optimizers import OptimizerWatch
from elastic.train.progress import RankProgress, Tag
from elastic.train.sharded import ShardedModule
from elastic.train.shards import own_memory, pack, room_for, unpack
from elastic.train.state import JobState
from elastic.train.transfer import specs_of

MESH = ReplicaMesh((("shard", 1),))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def trained(mesh: DeviceMesh, seed: int, steps: int = 1) -> tuple[JobState, nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    group = ReplicaProcessGroup(torch.device("cpu"), ModelReplica(MESH))
    job = JobState(seed=0, is_sharded=True)
    job.modules["model"] = ShardedModule(model, group)
    job.track("optimizer", optimizer)
    for _ in range(steps):
        step(model, optimizer)
    return job, model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def values(job: JobState) -> dict[str, torch.Tensor]:
    """Copies of this rank's part of the state."""
    _, tensors = pack(job.tree())
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)


def test_a_state_is_transferred_as_plain_tensors_and_json(mesh: DeviceMesh) -> None:
    sender, *_ = trained(mesh, 1)
    receiver, model, _ = trained(mesh, 2, steps=0)
    node, tensors = pack(sender.tree())
    assert not any(isinstance(tensor, DTensor) for tensor in tensors.values())
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    tree = unpack(copy.deepcopy(node), copies, receiver)
    receiver.check(tree, "the state of another rank")
    receiver.apply(tree)
    assert_equal(values(receiver), values(sender))
    assert all(isinstance(p, DTensor) for p in model.parameters())


def test_a_compatible_state_is_received_in_place(mesh: DeviceMesh) -> None:
    sender, *_ = trained(mesh, 1)
    receiver, model, _ = trained(mesh, 2, steps=0)
    node, tensors = pack(sender.tree())
    own = own_memory(node, specs_of(tensors), receiver)
    assert {own[f"model/model/{name}"].data_ptr() for name, _ in model.named_parameters()} == {
        cast(Any, p).to_local().data_ptr() for p in model.parameters()
    }
    arrived = {name: own.get(name, torch.empty_like(t)) for name, t in tensors.items()}
    for name, tensor in tensors.items():
        arrived[name].copy_(tensor)
    tree = unpack(node, arrived, receiver)
    receiver.check(tree, "the state of another rank")
    receiver.apply(tree)
    assert_equal(values(receiver), values(sender))


def test_a_row_of_a_weight_is_received(mesh: DeviceMesh) -> None:
    """Its strides are those of the whole weight, (8, 1), although it is contiguous: as of
    RowwiseParallel of a layer with one output."""
    jobs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = nn.Linear(4, 1, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
        job = JobState(seed=0, is_sharded=True)
        group = ReplicaProcessGroup(torch.device("cpu"), ModelReplica(MESH))
        job.modules["model"] = ShardedModule(model, group)
        weight: Any = model.weight
        weight._local_tensor = torch.randn(1, 8)[:, 4:]
        jobs.append((job, weight))
    (sender, sent), (receiver, received) = jobs
    node, tensors = pack(sender.tree())
    own = own_memory(node, specs_of(tensors), receiver)
    arrived = {name: own.get(name, torch.empty_like(t)) for name, t in tensors.items()}
    for name, tensor in tensors.items():
        arrived[name].copy_(tensor)
    receiver.apply(unpack(node, arrived, receiver))
    assert_equal({"": local_of(received)}, {"": local_of(sent)})


def test_an_incompatible_state_is_not_received_in_place(mesh: DeviceMesh) -> None:
    sender, *_ = trained(mesh, 1)
    node, tensors = pack(sender.tree())
    specs = specs_of(tensors)
    other, *_ = trained(mesh, 2, steps=0)
    other.seed = 1
    assert own_memory(node, specs, other) == {}
    narrow = JobState(seed=0, is_sharded=True)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    fully_shard(model, mesh=mesh["shard"])
    group = ReplicaProcessGroup(torch.device("cpu"), ModelReplica(MESH))
    narrow.modules["model"] = ShardedModule(model, group)
    narrow.track("optimizer", torch.optim.AdamW(model.parameters()))
    assert own_memory(node, specs, narrow) == {}


def test_only_the_weights_of_a_rank_without_state_are_overwritten(
    mesh: DeviceMesh,
) -> None:
    job, *_ = trained(mesh, 1, steps=0)
    current = CurrentStep()
    progress = RankProgress(job, OptimizerWatch(lambda: None), current)
    arriving = Tag(generation=2, step=7)
    assert progress.can_spare_weights(arriving)
    assert not progress.can_spare_weights(Tag(generation=1, step=0))  # the initial weights
    progress.begin_taking_over()
    torn = progress.rank_state("world")
    assert (torn.tag, torn.is_torn) == (None, True)
    assert progress.can_spare_weights(arriving)  # torn: another source may overwrite them
    progress.took_over(arriving)
    taken = progress.rank_state("world")
    assert (taken.tag, taken.is_torn) == (arriving, False)
    assert not progress.can_spare_weights(Tag(generation=2, step=8))


def test_an_undone_step_restores_weights_and_moments(mesh: DeviceMesh) -> None:
    job, model, optimizer = trained(mesh, 1)
    module, before, copies = job.modules["model"], values(job), WeightCopies()
    copies.take(module.local_parameters, [optimizer])
    step(model, optimizer)
    assert not torch.equal(values(job)["model/model/0.weight"], before["model/model/0.weight"])
    copies.restore(module.local_parameters, [optimizer])
    assert_equal(values(job), before)


def test_a_checkpoint_is_loaded_into_a_job_without_moments(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    saved, *_ = trained(mesh, 1)
    outcome = checkpoints.save(tmp_path, saved.tree(), step=1, nonce="3f9c0a11")
    fresh, *_ = trained(mesh, 2, steps=0)
    room = room_for(read_manifest(storage_for(tmp_path), outcome.name), fresh)
    tree = checkpoints.load(tmp_path, outcome.name, into=room, strict=False).state
    moments = tree["tracked"]["optimizer"]["state"][0]["exp_avg"]
    assert isinstance(moments, DTensor)
    fresh.check(tree, "the checkpoint")
    fresh.apply(tree)
    assert_equal(values(fresh), values(saved))


def test_tracking_a_sharded_average_is_rejected_with_a_hint(mesh: DeviceMesh) -> None:
    job, *_ = trained(mesh, 1, steps=0)
    average = nn.Linear(4, 2)
    fully_shard(average, mesh=mesh["shard"])
    with pytest.raises(ConfigError, match=r"run.track\(ema=…\) of a sharded module") as caught:
        job.track("ema", average)
    assert "ema = run.wrap(ema)" in (caught.value.hint or "")
    assert "elastic.join" not in str(caught.value), "it is used already"


def test_a_module_on_a_mesh_of_other_ranks_is_rejected(mesh: DeviceMesh) -> None:
    """Compared by ranks: a flattened dimension has its own name."""
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("rows",)))
    ShardedModule(model, ReplicaProcessGroup(torch.device("cpu"), ModelReplica(MESH)))
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("rows",)))
    two = ReplicaMesh.parse({"shard": 2})
    group = ReplicaProcessGroup(torch.device("cpu"), ModelReplica(two))
    with pytest.raises(
        ConfigError, match=r"'weight' is on .*rows.*, which lacks the dimension 'shard'"
    ) as caught:
        ShardedModule(model, group)
    assert 'mesh=run.mesh["shard"]' in (caught.value.hint or "")


def test_fully_shard_without_a_mesh_uses_the_ranks_of_the_replica(mesh: DeviceMesh) -> None:
    model = nn.Linear(4, 2)
    fully_shard(model)
    ShardedModule(model, ReplicaProcessGroup(torch.device("cpu"), ModelReplica(MESH)))


def test_an_optimizer_created_before_fully_shard_is_rejected(mesh: DeviceMesh) -> None:
    job, *_ = trained(mesh, 1, steps=0)
    job.check_unsharded()
    job.track("early", torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1))
    with pytest.raises(
        ConfigError, match=r"run.track\(early=…\): the optimizer's parameters are not"
    ):
        job.check_unsharded()


def test_an_optimizer_over_dtensors_of_an_earlier_stage_is_rejected() -> None:
    """Tensor parallelism creates DTensors, and FSDP replaces them."""
    dims = (("shard", 1), ("tp", 1))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "tp"))
        model = parallelize_module(nn.Linear(4, 2), mesh["tp"], ColwiseParallel())
        early = torch.optim.SGD(model.parameters(), lr=0.1)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        fully_shard(model, mesh=mesh["shard"])
        group = ReplicaProcessGroup(torch.device("cpu"), ModelReplica(ReplicaMesh(dims)))
        job = JobState(seed=0, is_sharded=True)
        job.modules["model"] = ShardedModule(model, group)
        job.track("early", early)
        with pytest.raises(
            ConfigError, match=r"run.track\(early=…\): the optimizer's parameters"
        ) as caught:
            job.check_unsharded()
        assert "create the optimizer after fully_shard" in (caught.value.hint or "")
    finally:
        dist.destroy_process_group()


def test_an_untracked_optimizer_over_old_weights_is_rejected_at_step(
    mesh: DeviceMesh,
) -> None:
    """torch lets it step over weights that belong to no module, and nothing is trained."""
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    early, others = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    fully_shard(model, mesh=mesh["shard"])
    watch = OptimizerWatch(lambda: cast(Any, SimpleNamespace(number=3)))
    group = ReplicaProcessGroup(torch.device("cpu"), ModelReplica(MESH))
    try:
        watch.watch(ShardedModule(model, group))
        model(torch.ones(3, 4)).sum().backward()
        other(torch.ones(3, 4)).sum().backward()
        others.step()  # same shapes, and it has gradients
        with pytest.raises(
            ConfigError, match=r"SGD.step\(\) at step 3: .* from before fully_shard"
        ):
            early.step()
    finally:
        watch.close()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_world_may_end_before_its_first_step(mesh: DeviceMesh, steps: int) -> None:
    """A rank dies, or too few nodes remain: the others keep their processes."""
    group = ReplicaProcessGroup(torch.device("cpu"), ModelReplica(MESH))
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    for part in (model[1], model):
        fully_shard(part, mesh=mesh["shard"])
    module = ShardedModule(model, group)
    group.form()
    try:
        module.enter_world()
        for _ in range(steps):
            model(torch.ones(3, 4)).sum().backward()
        module.leave_world()
        assert not module.in_world
        module.enter_world()
        model(torch.ones(3, 4)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        module.leave_world()
    finally:
        group.destroy(is_for_next=True)


def test_the_failure_of_one_rank_is_raised_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others name that rank and its error; it raises the error itself."""
    own = CheckpointError("no checkpoint can be loaded")

    def fails() -> None:
        raise own

    with monkeypatch.context() as patch:
        patch.setattr(shards, "all_gather_json", lambda report: [report, None])
        with pytest.raises(CheckpointError) as raised:
            shards.on_all_ranks(cast(Any, None), fails)
        assert raised.value is own
        patch.setattr(shards, "all_gather_json", lambda _: [f"CheckpointError: {own}", None])
        with pytest.raises(TrainingError, match="rank 0 could not restore the state"):
            shards.on_all_ranks(cast(Any, None), int)
