"""State of optimizers over sharded parameters that the optimizers of torch do not have.

8-bit moments and preconditioners, as DTensors and computed from whole tensors, survive a death;
plain tensors of a rank's shard, and tensor subclasses, are refused after the first update.
"""

from __future__ import annotations

import pytest
import torch
from idiom_runs import IdiomRuns

from elastic.testing.small_world.world import Death, RunOutcome

SCRIPT = """
import os, sys
way, kind, memory, disk, shard = sys.argv[1:]
os.environ["ELASTIC_NODE_MEMORY"] = memory
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset
import elastic


class Quantized(torch.Tensor):
    '''As in torchao: a wrapper around codes and scales.'''

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], []

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


def quantized(values):
    scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    return (values / scale * 127 + 128).round().to(torch.uint8), scale


def dequantized(codes, scale):
    return (codes.to(scale.dtype) - 128) / 127 * scale


class LowPrecision(torch.optim.Optimizer):
    '''Momentum in 8 bits, with one scale for each row, or in bfloat16.'''

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if kind == "bfloat16":
                    self.in_bfloat16(p, self.state[p], group["lr"])
                    continue
                weight, gradient, state = p.to_local(), p.grad.to_local(), self.state[p]
                moment = gradient
                if state:
                    moment = gradient + 0.9 * dequantized(*self.loaded(state))
                codes, scale = quantized(moment)
                self.store(state, p, codes, scale)
                weight.sub_(group["lr"] * dequantized(codes, scale))

    def in_bfloat16(self, p, state, lr):
        if not state:
            state["moment"] = torch.zeros_like(p, dtype=torch.bfloat16)
        state["moment"].mul_(0.9).add_(p.grad)
        p.sub_(lr * state["moment"])

    def loaded(self, state):
        if kind == "subclass":
            return state["moment"].codes, state["moment"].scale
        if kind == "plain":
            return state["codes"], state["scale"]
        return state["codes"].to_local(), state["scale"].to_local()

    def store(self, state, p, codes, scale):
        if kind == "subclass":
            state["moment"] = Quantized(codes, scale)
        elif kind == "plain":
            state["codes"], state["scale"] = codes, scale
        else:
            state["codes"] = DTensor.from_local(
                codes, p.device_mesh, p.placements, run_check=False,
                shape=p.shape, stride=p.stride())
            state["scale"] = DTensor.from_local(
                scale, p.device_mesh, p.placements, run_check=False,
                shape=(*p.shape[:-1], 1), stride=(1,) * p.ndim)


class Shampoo(torch.optim.Optimizer):
    '''Preconditions whole gradients, the same on all ranks.'''

    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                gradient, state = p.grad.full_tensor(), self.state[p]
                if not state:
                    state["step"] = 0
                    state["left"] = 0.1 * torch.eye(len(gradient), dtype=gradient.dtype)
                state["step"] += 1
                state["left"] += gradient @ gradient.T
                if state["step"] % 2 == 1:
                    values, vectors = torch.linalg.eigh(state["left"])
                    state["root"] = vectors @ torch.diag(values**-0.5) @ vectors.T
                p.sub_(group["lr"] * distribute_tensor(
                    state["root"] @ gradient, p.device_mesh, p.placements))


def created(mesh):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 7, bias=False), nn.Tanh(), nn.Linear(7, 1, bias=False))
    model.double()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    make = Shampoo if kind == "whole" else LowPrecision
    return model, make(model.parameters())


x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
mesh = {} if way == "build" else {"mesh": {"shard": int(shard)}}
saves = elastic.Checkpoints(disk, when=1000, memory=2)
run = elastic.join(checkpoints=saves, **mesh)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=8)
result = {}
if way == "replicas":
    made = created(run.mesh["shard"])
    run.wrap(made[0])
    run.track(optimizer=made[1])


def train():
    model, optimizer = run.build(created) if way == "build" else made
    for epoch in run.epochs(1):
        for inputs, targets in loader:
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        result[name] = value.full_tensor().detach().clone()


run.retry(train)
"""
SIZES = {"replicas": 4, "build": 2}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param("whole", "replicas", marks=pytest.mark.slow),
        ("rows", "build"),
        pytest.param("bfloat16", "build", marks=pytest.mark.slow),
    ],
)
def test_state_survives_a_death(runs: IdiomRuns, kind: str, way: str) -> None:
    size = SIZES[way]
    alone = runs.sharded(SCRIPT, "replicas", kind, 1, None, is_replaced=False)
    alone.assert_success(workers=1)
    death = Death(rank=1, event=alone.survivors[0].lines * 2 // 3)
    outcome = runs.sharded(SCRIPT, way, kind, size, death, is_replaced=True)
    assert outcome.died_at, outcome.describe()
    outcome.assert_success(workers=size)
    for worker in outcome.survivors:
        for name, value in alone.survivors[0].result.items():
            torch.testing.assert_close(worker.result[name], value, rtol=0, atol=1e-9, msg=name)


@pytest.mark.parametrize("way", SIZES)
def test_plain_tensors_of_shards_are_refused(runs: IdiomRuns, way: str) -> None:
    outcome = runs.sharded(SCRIPT, way, "plain", SIZES[way], None, is_replaced=False)
    message = "keeps plain tensors state['codes'] for the shards of '0.weight' that differ between"
    assert_refused(outcome, message)


def test_tensor_subclasses_are_refused(runs: IdiomRuns) -> None:
    outcome = runs.sharded(SCRIPT, "build", "subclass", 1, None, is_replaced=False)
    assert_refused(outcome, "keeps state['moment'] as a Quantized, a tensor subclass")


def assert_refused(outcome: RunOutcome, message: str) -> None:
    assert not outcome.survivors, outcome.describe()
    errors = [worker.error for worker in outcome.workers if worker.error]
    others = ("ReplicaLost", "GroupAborted")  # on ranks that first detect a dead peer
    expected = ("TrainingError: after step 0", *others)
    assert errors and all(error.startswith(expected) for error in errors)
    assert any(message in error for error in errors), errors
