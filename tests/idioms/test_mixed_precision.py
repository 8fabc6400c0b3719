"""Trainers of sharded models in mixed precision, as they are published, while ranks die.

The tutorial of FSDP2 (prefetching, meta device, full state dicts), torchtitan's loop, nanoGPT with
accumulation, and adapters on a quantised base. Rounding depends on which rank has which samples, so
results are compared with those of the same number of ranks without a death.
"""

from __future__ import annotations

import random

import pytest
from idiom_runs import IdiomRuns, assert_results

from elastic.testing.small_world.world import CALLS, LINES, Death

SCRIPT = """
import gc, math, os, sys, time
way, kind, memory, disk, shard = sys.argv[1:]
os.environ["ELASTIC_NODE_MEMORY"] = memory
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset
import elastic

TOKENS, WIDTH = 12, 8
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9)
        self.outer = nn.Linear(9, WIDTH)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


class LoRALinear(nn.Module):
    '''A frozen base of 4-bit codes in buffers, and trained adapters.'''

    def __init__(self, i, o, rank=2):
        super().__init__()
        w = torch.randn(o, i) * 0.2
        scale = w.abs().amax(1, keepdim=True)
        codes = ((w / scale + 1) * 7.5).round().to(torch.uint8)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.base_bias = nn.Parameter(torch.randn(o) * 0.1, requires_grad=False)
        self.lora_a, self.lora_b = nn.Linear(i, rank, bias=False), nn.Linear(rank, o, bias=False)
        nn.init.normal_(self.lora_b.weight, std=0.05)

    def forward(self, x):
        w = (self.codes.to(x.dtype) / 7.5 - 1) * self.scale.to(x.dtype)
        return F.linear(x, w, self.base_bias.to(x.dtype)) + 2.0 * self.lora_b(self.lora_a(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.layers = nn.ModuleList([Block(), Block()])
        if kind == "lora":
            for layer in self.layers:
                layer.inner = LoRALinear(WIDTH, 9)

    def reset_parameters(self):
        for m in self.modules():
            if m is not self and hasattr(m, "reset_parameters"):
                m.reset_parameters()

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def whole():
    torch.manual_seed(5)
    return Net()


def set_modules_to_forward_prefetch(model, n):
    for i, layer in enumerate(model.layers):
        layers = [model.layers[i + j] for j in range(1, n + 1) if i + j < len(model.layers)]
        layer.set_modules_to_forward_prefetch(layers)


def set_modules_to_backward_prefetch(model, n):
    for i, layer in enumerate(model.layers):
        layers = [model.layers[i - j] for j in range(1, n + 1) if i - j >= 0]
        layer.set_modules_to_backward_prefetch(layers)


class GarbageCollection:
    def __init__(self, gc_freq=2):
        self.gc_freq = gc_freq
        gc.disable()
        gc.collect(1)

    def run(self, step):
        if step > 1 and step % self.gc_freq == 0:
            gc.collect(1)


def created(mesh):
    kwargs = {"mesh": mesh, "mp_policy": MIXED}
    if kind == "fsdp2":
        with torch.device("meta"):
            model = Net()
    else:
        model = whole()
    if kind == "lora":
        for name, p in model.named_parameters():
            p.requires_grad_("lora_" in name)
    for layer in model.layers:
        fully_shard(layer, **kwargs)
    fully_shard(model, **kwargs)
    if kind == "fsdp2":
        set_modules_to_forward_prefetch(model, 2)
        set_modules_to_backward_prefetch(model, 2)
        model.to_empty(device="cpu")
        model.reset_parameters()
        sharded_sd = {}
        meta = model.state_dict()
        for name, full in whole().state_dict().items():
            own = meta[name]
            own = distribute_tensor(full, own.device_mesh, own.placements)
            sharded_sd[name] = nn.Parameter(own)
        model.load_state_dict(sharded_sd, assign=True)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=1e-2)}
    if kind == "titan":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.9, 0.95), fused=True)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 4))
        return {"model": model, "optimizer": optimizer, "scheduler": warm_up}
    if kind == "nanogpt":
        decay = [p for p in model.parameters() if p.dim() >= 2]
        rest = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=6e-3, betas=(0.9, 0.95), fused=True)
        return {"model": model, "optimizer": optimizer}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    return {"model": model, "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)}


tokens = torch.randint(0, TOKENS, (48, 5), generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(tokens[:, :-1], tokens[:, 1:])
mesh = {} if way == "build" else {"mesh": {"shard": int(shard)}}
run = elastic.join(checkpoints=elastic.Checkpoints(disk, when=1000, memory=2), **mesh)
loader = run.loader(DataLoader(dataset, batch_size=12, shuffle=True), global_batch=12)
result = {}
if way == "replicas":
    made = created(run.mesh["shard"])
    run.wrap(made["model"])
    run.track(**{name: one for name, one in made.items() if not isinstance(one, nn.Module)})


def place(name):
    return f"{disk}-{name}-{run.world.replica if mesh else 0}"


def loss_of(model, x, y):
    return F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


def train_fsdp2(model, optim):
    for epoch in run.epochs(2):
        for x, y in loader:
            model.unshard()
            loss = loss_of(model, x, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optim.step()
            optim.zero_grad()
    # checkpoint.py: the full state dict by hand
    full = {}
    for name, p in model.state_dict().items():
        p = p.full_tensor()
        if dist.get_rank() == 0:
            full[name] = p.cpu()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    get_model_state_dict(model, options=options)
    get_optimizer_state_dict(model=model, optimizers=optim, options=options)


def train_titan(model, optim, scheduler):
    collector = GarbageCollection()
    ntokens, started = 0, time.perf_counter()
    for epoch in run.epochs(2):
        for i, (x, y) in enumerate(loader, start=loader.index):
            collector.run(i)
            optim.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()], 2.0, False, True)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm, foreach=True)
            optim.step()
            scheduler.step()
            ntokens += y.numel()
            if i % 2 == 0:
                total = torch.stack([loss.detach(), norm.float()])
                dist.all_reduce(total)
                speed = ntokens / (time.perf_counter() - started)
                print(f"step {i} loss {total[0] / dist.get_world_size():.4f} tps {speed:.0f}")
            if i == 2:
                options = StateDictOptions(flatten_optimizer_state_dict=True)
                state = {"model": get_model_state_dict(model),
                         "optimizer": get_optimizer_state_dict(model, optim, options=options)}
                dcp.save(state, checkpoint_id=place(f"titan-{epoch}"))
    gc.enable()


def train_nanogpt(model, optim):
    accumulate, steps = 2, 8
    def get_lr(it):
        if it < 2:
            return 6e-3 * (it + 1) / 3
        return 6e-4 + 0.5 * (1 + math.cos(math.pi * (it - 2) / steps)) * 5.4e-3
    for epoch in run.epochs(2):
        for i, (x, y) in enumerate(loader, start=loader.index):
            is_last = (i + 1) % accumulate == 0
            if i % accumulate == 0:
                lr = get_lr(epoch * 2 + i // accumulate)
                for group in optim.param_groups:
                    group["lr"] = lr
            model.set_requires_gradient_sync(is_last)
            (loss_of(model, x, y) / accumulate).backward()
            if not is_last:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
            optim.zero_grad(set_to_none=True)


def train_lora(model, optim, scheduler):
    for epoch in run.epochs(2):
        model.train()
        for x, y in loader:
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, x, y)
            loss.backward()
            nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            optim.step()
            scheduler.step()
            model.zero_grad()


def train():
    objects = run.build(created) if way == "build" else made
    rest = {k: v for k, v in objects.items() if k not in ("model", "optimizer")}
    globals()["train_" + kind](objects["model"], objects["optimizer"], **rest)
    for name, value in objects["model"].state_dict().items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        result[name] = value.detach().clone()


run.retry(train)
"""
SIZES = {"replicas": 4, "build": 3}
KINDS = ("fsdp2", "titan", "nanogpt", "lora")


def check(runs: IdiomRuns, way: str, kind: str, seed: int) -> None:
    draw, size = random.Random(f"{way}/{kind}/{seed}"), SIZES[way]
    undisturbed = runs.sharded(SCRIPT, way, kind, size, None, is_replaced=False)
    undisturbed.assert_success(workers=size)
    rank, counted = draw.randrange(size), draw.choice([LINES, CALLS])
    own = undisturbed.workers[rank]
    # The number of calls varies slightly between runs.
    last = own.lines if counted == LINES else int(own.calls * 0.9)
    death = Death(rank=rank, event=draw.randint(1, last), counted=counted)
    outcome = runs.sharded(SCRIPT, way, kind, size, death, is_replaced=True)
    assert outcome.died_at, outcome.describe()
    outcome.assert_success(workers=size)
    assert_results(outcome, undisturbed.survivors[0].result, tolerance=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), [("nanogpt", "replicas")])
def test_a_death_does_not_change_the_result(runs: IdiomRuns, kind: str, way: str) -> None:
    check(runs, way, kind, 0)


@pytest.mark.soak
@pytest.mark.parametrize("way", SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(20))
def test_a_death_anywhere_does_not_change_the_result(
    runs: IdiomRuns, kind: str, way: str, seed: int
) -> None:
    check(runs, way, kind, seed)
