"""The training script of ``test_pipeline_dimensions.py``: stages with experts.

Arguments: the way of training, a schedule of ``torch.distributed.pipelining``, and the dimensions
of the replica (``pp=2``, ``ep=2``); without any, one process trains the whole model.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import elastic

way, schedule_name, *dims = sys.argv[1:]
mesh = {name: int(size) for name, size in (dim.split("=") for dim in dims)}
WIDTH, HIDDEN, EXPERTS, BLOCKS, PIECES, BATCH = 4, 6, 4, 4, 4, 16


def gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def summed(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


def own_part(x, group):
    return x.chunk(group.size())[group.rank()].clone()


class ToExperts(torch.autograd.Function):
    """The tokens of all ranks, which are the same along ``ep``."""

    @staticmethod
    def forward(ctx, x, group, is_same):
        ctx.group, ctx.is_same = group, is_same
        return x.view_as(x) if is_same else gathered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        gradient = summed(gradient, ctx.group)
        return gradient if ctx.is_same else own_part(gradient, ctx.group), None, None


class FromExperts(torch.autograd.Function):
    """The sum over the ranks, of this rank's tokens."""

    @staticmethod
    def forward(ctx, x, group, is_same):
        ctx.group, ctx.is_same = group, is_same
        total = summed(x, group)
        return total if is_same else own_part(total, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient if ctx.is_same else gathered(gradient, ctx.group), None, None


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * 0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.5)
        self.first = 0  # of this rank

    def forward(self, x, scores):
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        own = scores[:, self.first : self.first + len(up)]
        parts = (torch.relu(x @ up[i]) @ down[i] for i in range(len(up)))
        return sum(own[:, i : i + 1] * part for i, part in enumerate(parts))


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.embed = nn.Linear(5, WIDTH) if number == 0 else nn.Identity()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down, self.experts = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), Experts()
        self.head = nn.Linear(WIDTH, 1) if number == BLOCKS - 1 else nn.Identity()
        self.group = None  # of the ranks with other experts

    def forward(self, x):
        x = self.embed(x)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        return self.head(x + self.mixed(x, self.router(x).softmax(-1)))

    def mixed(self, x, scores):
        if self.group is None:
            return self.experts(x, scores)
        x, scores = (ToExperts.apply(t, self.group, "ep" in mesh) for t in (x, scores))
        return FromExperts.apply(self.experts(x, scores), self.group, "ep" in mesh)


def distribute(block):
    over = next((name for name in ("ep", "dp_ep") if name in mesh), None)
    if over:
        block.group = run.mesh[over].get_group()
        block.experts.first = run.mesh[over].get_local_rank() * EXPERTS // run.mesh[over].size()
        for name, whole in list(block.experts.named_parameters()):
            own = own_part(whole.detach(), block.group)
            given = DTensor.from_local(own, run.mesh[over], [Shard(0)])
            setattr(block.experts, name, nn.Parameter(given))
    if "tp" in mesh:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, run.mesh["tp"], plan)


def shard(stage):
    names = tuple(name for name in mesh if name == "shard" or name.startswith("dp"))
    if names:
        over = run.mesh[names]._flatten("all") if len(names) > 1 else run.mesh[names[0]]
        for block in stage:
            if "dp_ep" in mesh:
                fully_shard(block.experts, mesh=run.mesh["dp_mod"])
            if "nested" in way:
                fully_shard(block, mesh=over)
        fully_shard(stage, mesh=over)
    return stage


run = elastic.join(**({"mesh": mesh} if mesh else {}))
torch.manual_seed(5)
blocks = [Block(number).double() for number in range(BLOCKS)]
pp = run.mesh["pp"] if mesh else None
place, count = (pp.get_local_rank(), pp.size()) if mesh else (0, 1)
for block in blocks if mesh else ():
    distribute(block)
is_interleaved = "Interleaved" in schedule_name or "ZBV" in schedule_name
numbers, stage_count = [place], count  # of this rank's stages
if is_interleaved:
    stage_count = 2 * count
    second = stage_count - 1 - place if "ZBV" in schedule_name else place + count
    numbers = [place, second]
each = BLOCKS // stage_count
places = [range(number * each, (number + 1) * each) for number in numbers]
stages = [shard(nn.Sequential(*(blocks[i] for i in own))) for own in places]
whole = nn.ModuleList(stages)
if "together" in way:
    run.wrap(whole)
elif mesh:
    for stage in stages:
        run.wrap(stage)
else:
    stages = [run.wrap(stages[0])]
optimizer = torch.optim.AdamW(whole.parameters(), lr=0.02, foreach=False)
run.track(optimizer=optimizer)
x = torch.randn(4 * BATCH, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
options = {"batch_size": BATCH, "shuffle": True, "drop_last": True}
loader = run.loader(DataLoader(dataset, **options), global_batch=BATCH)
result = {}


def scheduled():
    made = [
        pipelining.PipelineStage(stage, number, stage_count, run.device, group=pp.get_group())
        for stage, number in zip(stages, numbers)
    ]
    kind = getattr(pipelining.schedules, schedule_name)
    schedule = kind(made if is_interleaved else made[0], PIECES, loss_fn=F.mse_loss)
    has_first, has_last = any(s.is_first for s in made), any(s.is_last for s in made)

    def backward(inputs, targets):
        expected = {"target": targets, "losses": []} if has_last else {}
        schedule.step(*([inputs] if has_first else []), **expected)

    return backward


def alone(inputs, targets):
    F.mse_loss(stages[0](inputs), targets).backward()


def train():
    backward = scheduled() if mesh else alone
    for _ in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            backward(inputs, targets)
            run.reduce_gradients()
            optimizer.step()
    for own, stage in zip(places, whole):
        for name, value in stage.state_dict().items():
            number, _, rest = name.partition(".")
            full = getattr(value, "full_tensor", lambda value=value: value)()
            result[f"{own[int(number)]}.{rest}"] = full.detach().clone()


run.retry(train)
