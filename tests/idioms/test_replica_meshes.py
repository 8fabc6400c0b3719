"""Supported meshes of a replica: valid ones train, all others are rejected with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from idiom_runs import IdiomRuns
from torch import nn

from elastic.testing.small_world.world import RunOutcome

# Each step uses all samples, so their order does not matter.
SCRIPT = """
import sys
import torch, torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module)
from torch.utils.data import DataLoader, TensorDataset
import elastic

MESHES = {
    "context": {"shard": 2, "cp": 2},
    "unsharded": {"shard": 2, "cp": 2},
    "tensor": {"shard": 2, "tp": 2},
    "refusals": {"shard": 2, "tp": 2},
    "experts": {"ep": 4},
    "one rank": {"shard": 1},
    "sequence": {"tp": 2},
}

kind = sys.argv[1]
run = elastic.join(mesh=MESHES[kind])
x = torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
if kind == "one rank":
    x = x[:22]  # four ranks have 6, 6, 5 and 5 samples
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
loader = run.loader(DataLoader(dataset, batch_size=len(x)), global_batch=len(x))


def whole():
    torch.manual_seed(5)
    norm = [nn.LayerNorm(4)] if kind == "sequence" else []
    return nn.Sequential(nn.Linear(6, 4), *norm, nn.Linear(4, 1)).double()


def sharded(mesh, **more):
    return fully_shard(whole(), mesh=mesh, **more)


def in_part():
    model = whole()
    fully_shard(model[0], mesh=run.mesh["shard"])
    return model


def in_two_meshes():
    model, meshes = whole(), (run.mesh["shard"], run.mesh["shard", "tp"]._flatten("both"))
    infos = [FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0) for mesh in meshes]
    first = model[0].weight

    def place(parameter):
        return ShardPlacementResult(Shard(0), infos[parameter is first])

    return fully_shard(model, mesh=meshes[0], shard_placement_fn=place)


result = {}


def refused(name, make):
    try:
        run.wrap(make())
    except elastic.ConfigError as error:
        result[name] = torch.tensor(list(f"{error} {error.hint}".encode()))


model = whole()
if kind == "tensor":
    model = sharded(run.mesh["shard"])
elif kind == "refusals":
    refused("shard is missing", lambda: sharded(run.mesh["tp"]))
    refused("replicated", lambda: sharded(run.mesh["shard", "tp"]))
    diagonal = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("a", "b"))["b"]
    refused("other ranks", lambda: sharded(diagonal))
    refused("tensor parallel alone", lambda: parallelize_module(
        whole(), run.mesh["tp"], {"0": ColwiseParallel()}))
    refused("in part", in_part)
    refused("two meshes", in_two_meshes)
    model = sharded(run.mesh["shard"])
elif kind == "one rank":
    model = sharded(run.mesh["shard"])
elif kind == "sequence":  # each rank has half of the samples between the linear layers
    parallelize_module(model, run.mesh["tp"], {
        "0": ColwiseParallel(output_layouts=Shard(0)),
        "1": SequenceParallel(sequence_dim=0),
        "2": RowwiseParallel(input_layouts=Shard(0)),
    })
elif kind == "context":
    refused("cp is missing", lambda: sharded(run.mesh["shard"]))
    model = sharded(run.mesh["shard", "cp"]._flatten("shard_cp"))
model = run.wrap(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=False)
run.track(optimizer=optimizer)


def train():
    half = run.world.rank_in_replica % 2  # of each sample
    seen = torch.tensor([1.0 - half] * 3 + [float(half)] * 3).double()
    if kind in ("refusals", "one rank", "sequence"):
        seen = torch.ones(6).double()
    for _ in run.epochs(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs * seen), targets).backward()
            optimizer.step()
    full = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in model.named_parameters()}
    result.update({n: p.detach().clone() for n, p in full.items()})


run.retry(train)
"""

OfKind = Callable[[str], RunOutcome]
REFUSED = {
    "shard is missing": "which lacks the dimension 'shard': it splits the batch",
    "replicated": "run.wrap() of a module with its own replicate dimension: '0.weight'",
    "other ranks": "run.wrap() of a module sharded over another mesh: '0.weight' is on",
    "tensor parallel alone": "run.wrap() of a module with DTensors and without fully_shard",
    "in part": "its parameter '1.weight' is not sharded, so nothing would reduce its gradients",
    "two meshes": "run.wrap() of a module with several groups of parameters in one fully_shard",
}


@pytest.fixture
def of_kind(runs: IdiomRuns, tmp_path: Path) -> OfKind:
    def run(kind: str) -> RunOutcome:
        path = tmp_path / "script.py"
        path.write_text(SCRIPT)
        return runs.world.run(path, tmp_path / "out", size=4, per_node=4, arguments=[kind])

    return run


def text(tensor: torch.Tensor) -> str:
    return bytes(tensor.tolist()).decode()


def trained_alone(
    x: torch.Tensor, *parts: torch.Tensor, norm: tuple[nn.Module, ...] = ()
) -> dict[str, torch.Tensor]:
    """The reference: one process trains on all samples with the mean loss of these parts of each
    sample."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 4), *norm, nn.Linear(4, 1)).double()
    targets = x.sin().sum(1, keepdim=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        losses = [F.mse_loss(model(x * seen), targets) for seen in parts]
        (sum(losses) / len(parts)).backward()  # type: ignore[union-attr]
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def samples() -> torch.Tensor:
    return torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def trained_on_both_halves() -> dict[str, torch.Tensor]:
    first = torch.tensor([1.0] * 3 + [0.0] * 3).double()
    return trained_alone(samples(), first, 1 - first)


def test_uneven_shares_are_weighted_in_replicas_of_one_rank(of_kind: OfKind) -> None:
    """FSDP has no reduce-scatter there."""
    outcome = of_kind("one rank")
    outcome.assert_success(workers=4)
    expected = trained_alone(samples()[:22], torch.ones(6).double())
    for worker in outcome.workers:
        for name, parameter in expected.items():
            assert torch.allclose(worker.result[name], parameter, rtol=0, atol=1e-12), name


def test_gradients_are_averaged_over_ranks_that_split_a_sample(of_kind: OfKind) -> None:
    outcome = of_kind("context")
    outcome.assert_success(workers=4)
    expected = trained_on_both_halves()
    for worker in outcome.workers:
        reasons = text(worker.result["cp is missing"])
        assert "which lacks the dimension 'cp': its ranks have different parts of each" in reasons
        assert 'run.mesh["shard", "cp"]._flatten("shard_cp")' in reasons
        for name, parameter in expected.items():
            assert torch.allclose(worker.result[name], parameter, rtol=0, atol=1e-12), name


def test_an_unsharded_module_in_a_replica_trains_like_ddp(of_kind: OfKind) -> None:
    outcome = of_kind("unsharded")
    outcome.assert_success(workers=4)
    expected = trained_on_both_halves()
    for worker in outcome.workers:
        for name, parameter in expected.items():
            assert torch.allclose(worker.result[name], parameter, rtol=0, atol=1e-12), name


@pytest.mark.slow
def test_partial_gradients_of_sequence_parallelism_are_not_taken_for_different_ones(
    of_kind: OfKind,
) -> None:
    """torch leaves a norm's gradient as the ranks' parts of a sum."""
    outcome = of_kind("sequence")
    outcome.assert_success(workers=4)
    expected = trained_alone(samples(), torch.ones(6).double(), norm=(nn.LayerNorm(4),))
    for worker in outcome.workers:
        for name, parameter in expected.items():
            assert torch.allclose(worker.result[name], parameter, rtol=0, atol=1e-12), name


def test_ranks_that_split_a_sample_along_tp_are_detected(of_kind: OfKind) -> None:
    ended = [w for w in of_kind("tensor").workers if w.exit_code is not None]
    text = "rank 1 has different weights from rank 0 in model (parameter 0, '0.weight')"
    assert any(text in worker.error for worker in ended)
    for worker in ended:
        assert worker.exit_code == 1
        # All ranks compare, and the first to raise ends: its peers may see that before the result.
        assert text in worker.error or worker.error.startswith("ReplicaLost: ")


def test_a_module_with_unreduced_gradients_is_rejected(of_kind: OfKind) -> None:
    outcome = of_kind("refusals")
    outcome.assert_success(workers=4)
    for worker in outcome.workers:
        reasons = {name: text(worker.result[name]) for name in REFUSED}
        assert [name for name in REFUSED if REFUSED[name] not in reasons[name]] == [], reasons


def test_experts_that_each_rank_creates_are_rejected(of_kind: OfKind) -> None:
    ended = [w for w in of_kind("experts").workers if w.exit_code is not None]
    refused = [w for w in ended if w.exit_code == 2]
    assert refused
    for worker in (
        w for w in ended if w not in refused
    ):  # it has lost a rank that was refused before
        assert "peer" in worker.log or "remote worker" in worker.log, worker.log
    for worker in refused:
        assert "with the dimension 'ep', of a module without a parameter that is" in worker.error
        assert 'DTensor.from_local(own, run.mesh["ep"], [Shard(0)])' in worker.log
