"""The training script of ``test_experts.py``: a model with a mixture of experts.

Arguments: the way of training, a folder for checkpoints or "", the number of epochs, the global
batch, and the dimensions of the replica (``ep=2``); without any, the model is not sharded.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import elastic

way, folder, epochs, batch, *dims = sys.argv[1:]
mesh = {name: int(size) for name, size in (dim.split("=") for dim in dims)}
is_lazy = not {"shard", "dp_mod"} & set(mesh)  # FSDP needs the same gradients on all ranks
WIDTH, HIDDEN, EXPERTS, CHOSEN, TOKENS = 4, 6, 4, 2, 2


class SumGradients(torch.autograd.Function):
    """The same tensor; gradients are summed over the group."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Sum(torch.autograd.Function):
    """The sum over the group."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Exchange(torch.autograd.Function):
    """Rows of each rank to the others: ``sent`` and ``received`` count them by rank."""

    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        found = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(found, x.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx, gradient):
        found = gradient.new_empty(sum(ctx.sent), *gradient.shape[1:])
        dist.all_to_all_single(
            found, gradient.contiguous(), ctx.sent, ctx.received, group=ctx.group
        )
        return found, None, None, None


class Part(torch.autograd.Function):
    """This rank's part of the tokens; gradients come from all ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, ctx.group), None


class Whole(torch.autograd.Function):
    """The tokens of all ranks, whose parts this rank gets back."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(ctx.group.size())[ctx.group.rank()].clone(), None


def gathered(x, group):
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


class Experts(nn.Module):
    """Grouped weights. Experts without tokens are skipped."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x, own):
        """``own``: for each token, the number of one of this rank's experts; -1: none of them."""
        found = x * 0.0  # also a rank without tokens takes part in the backward pass
        up, down = (None, None) if is_lazy else (local(self.up), local(self.down))
        for number in range(own.max().item() + 1 if len(own) else 0):
            rows = (own == number).nonzero().squeeze(1)
            if len(rows):
                if up is None:
                    up, down = local(self.up), local(self.down)
                y = torch.relu(x[rows] @ up[number]) @ down[number]
                found = found.index_add(0, rows, y)
        if not is_lazy:
            found = found + 0.0 * (up.sum() + down.sum())
        return found


def local(weight):
    return weight.to_local() if isinstance(weight, DTensor) else weight


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        if way.startswith("loop"):
            self.experts = nn.ModuleList([Dense() for _ in range(EXPERTS)])
        else:
            self.experts = Experts()
        self.group = None  # of the ranks with other experts

    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).topk(CHOSEN)
        if way.startswith("loop"):
            return self.one_by_one(x, scores, chosen)
        if self.group is None:
            return self.combined(x, scores, chosen, self.experts)
        if way.startswith("masked"):
            if "partial gradients" not in way:
                x, scores = (SumGradients.apply(t, self.group) for t in (x, scores))
            return Sum.apply(self.combined(x, scores, chosen, self.masked), self.group)
        if "same samples" in way:
            x, scores = (Part.apply(t, self.group) for t in (x, scores))
            chosen = chosen.chunk(self.group.size())[self.group.rank()]
            found = self.combined(x, scores, chosen, self.exchanged)
            return Whole.apply(found, self.group)
        return self.combined(x, scores, chosen, self.exchanged)

    def combined(self, x, scores, chosen, compute):
        found = compute(x.repeat_interleave(CHOSEN, 0), chosen.flatten())
        return (found.unflatten(0, (-1, CHOSEN)) * scores.unsqueeze(-1)).sum(1)

    def one_by_one(self, x, scores, chosen):
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                y = expert(x[rows]) * scores[rows, place].unsqueeze(1)
                found = found.index_add(0, rows, y)
        return found

    @property
    def each(self):
        return EXPERTS // self.group.size()

    def masked(self, x, chosen):
        own = chosen - self.group.rank() * self.each
        return self.experts(x, torch.where((own >= 0) & (own < self.each), own, -1))

    def exchanged(self, x, chosen):
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        sent, received = (c.view(-1, self.each).sum(1).tolist() for c in (counts, theirs))
        tokens = Exchange.apply(x[order], sent, received, self.group)
        own = torch.arange(self.each).repeat(self.group.size()).repeat_interleave(theirs)
        found = Exchange.apply(self.experts(tokens, own), received, sent, self.group)
        return torch.zeros_like(x).index_copy(0, order, found)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Linear(3, WIDTH), nn.LayerNorm(WIDTH)
        self.mixture, self.head = Mixture(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        hidden = torch.tanh(self.embed(x))
        mixed = self.mixture(self.norm(hidden).flatten(0, 1)).view_as(hidden)
        return self.head(hidden + mixed)


os.environ["ELASTIC_NODE_MEMORY"] = f"{folder}-memory" if "memory" in way else ""
saves = elastic.Checkpoints(folder, when=1000, memory=2 if "memory" in way else False)
saves = saves if folder else None
run = elastic.join(checkpoints=saves, **({"mesh": mesh} if mesh else {}))
torch.manual_seed(5)
model = Net().double()
mixture, experts = model.mixture, model.mixture.experts


def distribute(over):
    """Experts as sharded parameters of ``run.mesh[over]``; some of each rank's own in a misuse."""
    place, size = run.mesh[over].get_local_rank(), run.mesh[over].size()
    mixture.group = run.mesh[over].get_group()
    for name, whole in list(experts.named_parameters()):
        own = whole.detach().chunk(size)[place].clone()
        given = DTensor.from_local(own, run.mesh[over], [Shard(0)])
        if "distributed" in way:
            given = distribute_tensor(whole.detach(), run.mesh[over], [Shard(0)])
        if "own experts" in way or ("own down" in way and name == "down"):
            given = own
        setattr(experts, name, nn.Parameter(given))
    if "other names" in way:
        experts.register_parameter(f"extra{place}", nn.Parameter(torch.ones(2).double()))
    if "other weights" in way:
        with torch.no_grad():
            model.embed.weight += place


if way == "loop" and mesh:
    for expert in experts:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(expert, run.mesh[dims[0].split("=")[0]], plan)
elif mesh:
    distribute(next(name for name in ("ep", "dp_ep", "shard") if name in mesh))
if "tp" in mesh and way != "loop":
    column = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, run.mesh["tp"], {"embed": column})
if "whole batch" in way:
    fully_shard(model, mesh=run.mesh["shard"], ignored_params=set(experts.parameters()))
elif "dp_mod" in mesh:
    fully_shard(experts, mesh=run.mesh["dp_mod"])
    fully_shard(model, mesh=run.mesh["dp_mod", "dp_ep"]._flatten("dp_all"))
elif "rest everywhere" in way:
    fully_shard(experts, mesh=run.mesh["shard"])
    fully_shard(model, mesh=run.mesh["shard", "ep"]._flatten("all"))
elif "shard" in mesh:
    if "in parts" in way:
        fully_shard(experts, mesh=run.mesh["shard"], shard_placement_fn=lambda p: Shard(1))
        fully_shard(mixture, mesh=run.mesh["shard"])
    fully_shard(model, mesh=run.mesh["shard"])
unused = {} if mesh else {"find_unused_parameters": True}  # of DDP
wrapped = run.wrap(model, **unused)
kind = torch.optim.SGD if "sgd" in way else torch.optim.AdamW
rate = 1e-6 if "slow" in way else 0.02
optimizer = kind(wrapped.parameters(), lr=rate, **({} if "sgd" in way else {"foreach": False}))
run.track(optimizer=optimizer)
x = torch.randn(47, TOKENS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(x, x.sin().sum(2, keepdim=True))
loader = run.loader(
    DataLoader(dataset, batch_size=int(batch), shuffle=True, drop_last="even" in way),
    global_batch=int(batch),
)
result = {}


def train():
    result["resumed"] = torch.tensor(run.state.get("steps", 0))
    for _ in run.epochs(int(epochs)):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(wrapped(inputs), targets)
            loss.backward()
            optimizer.step()
            run.state["steps"] = run.state.get("steps", 0) + 1
    for name, value in model.state_dict().items():
        whole = getattr(value, "full_tensor", lambda value=value: value)()
        result[name] = whole.detach().clone()


run.retry(train)
