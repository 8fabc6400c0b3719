"""SimCLR with negatives from all ranks

An autograd function gathers the embeddings. Shares differ when the number of ranks changes, so they
are padded before they are gathered. Gradients are averaged over the ranks, each rank's weighted by
its share: the local loss is a mean over its own samples.

Group: Gradients
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
images = torch.randn(96, 4)


class TwoViews(torch.utils.data.Dataset):
    def __len__(self):
        return len(images)

    def __getitem__(self, index):
        return images[index] + 0.1 * torch.randn(4), images[index] + 0.1 * torch.randn(4)


class GatherLayer(torch.autograd.Function):
    """Gather tensors of different lengths from all ranks."""

    @staticmethod
    def forward(ctx, tensor):
        sizes = [torch.zeros(1, dtype=torch.long) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, torch.tensor([len(tensor)]))
        ctx.sizes = [int(size) for size in sizes]
        padded = tensor.new_zeros(max(ctx.sizes), tensor.shape[1])
        padded[: len(tensor)] = tensor
        gathered = [torch.empty_like(padded) for _ in ctx.sizes]
        dist.all_gather(gathered, padded)
        return torch.cat([part[:size] for part, size in zip(gathered, ctx.sizes)])

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        start = sum(ctx.sizes[: dist.get_rank()])
        return grad[start : start + ctx.sizes[dist.get_rank()]]


def nt_xent(z1, z2, samples, temperature=0.5):
    z1, z2 = F.normalize(z1, dim=1), F.normalize(z2, dim=1)
    all1, all2, first = z1, z2, 0
    if dist.is_initialized() and dist.get_world_size() > 1:
        all1, all2 = GatherLayer.apply(z1), GatherLayer.apply(z2)
        first = sum(samples[: dist.get_rank()])
    mine = torch.arange(first, first + len(z1))
    total = len(all1)
    logits = torch.cat([z1, z2]) @ torch.cat([all1, all2]).T / temperature
    own = torch.cat([mine, mine + total])
    logits = logits.masked_fill(F.one_hot(own, 2 * total).bool(), -1e9)
    return F.cross_entropy(logits, torch.cat([mine + total, mine]))


run = elastic.join()
encoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
model = run.wrap(encoder)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
loader = run.loader(
    DataLoader(TwoViews(), batch_size=8, shuffle=True, drop_last=True), global_batch=12
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader))
run.track(optimizer=optimizer, scheduler=scheduler)


def shares(n):
    if not dist.is_initialized():
        return [n]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, n)
    return every


def train():
    for epoch in run.epochs(3):
        for view1, view2 in loader:
            z1, z2 = model(torch.cat([view1, view2])).chunk(2)
            samples = shares(len(view1))
            loss = nt_xent(z1, z2, samples)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()


run.retry(train)
result = model.state_dict()
