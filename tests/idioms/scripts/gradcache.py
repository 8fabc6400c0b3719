"""A contrastive loss over a large batch, in chunks (GradCache)

Embeddings are computed without gradients, then the gradients of the loss with respect to them, then
the embeddings again, chunk by chunk, with `no_sync` for all but the last.

Group: Gradients
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(48, 5)
dataset = TensorDataset(x, x + 0.1 * torch.randn(48, 5))

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def gathered(mine):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return torch.cat(parts), sum(len(part) for part in parts[: dist.get_rank()])


def train():
    for epoch in run.epochs(3):
        for queries, keys in loader:
            with torch.no_grad():
                q, k = (torch.cat([model(c) for c in v.split(2)]) for v in (queries, keys))
            q.requires_grad_()
            everyones, first = gathered(k)
            target = torch.arange(first, first + len(q))
            F.cross_entropy(q @ everyones.T, target).backward()
            optimizer.zero_grad()
            chunks = list(zip(queries.split(2), q.grad.split(2)))
            for i, (chunk, grad) in enumerate(chunks):
                with nullcontext() if i == len(chunks) - 1 else model.no_sync():
                    (model(chunk) * grad).sum().backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
