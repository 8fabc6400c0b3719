"""Hard-example mining: an epoch begins with the samples of the largest loss

`order` reads a tracked copy of the losses, made once at the beginning of an epoch: a loop that
resumes in the middle of an epoch computes its order again. An order that changes during an epoch is
refused at the end of the first one.

Group: Data
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(48, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True), torch.arange(48))

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
losses = nn.Module()
losses.register_buffer("now", torch.zeros(48))
losses.register_buffer("before", torch.zeros(48))
run.track(optimizer=optimizer, losses=losses)


def order(epoch):
    return losses.before.argsort(descending=True, stable=True)


loader = run.loader(DataLoader(dataset, batch_size=8), global_batch=12, order=order)


def note(indices, values):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (indices, values))
    for some, theirs in parts:
        losses.now[some] = theirs


def train():
    run.state.setdefault("ordered", 0)
    for epoch in run.epochs(3):
        if epoch > run.state["ordered"]:
            losses.before.copy_(losses.now)
            run.state["ordered"] = epoch
        for inputs, targets, indices in loader:
            each = F.mse_loss(model(inputs), targets, reduction="none").squeeze(1)
            optimizer.zero_grad()
            each.mean().backward()
            optimizer.step()
            note(indices, each.detach())


run.retry(train)
result = {**model.state_dict(), **losses.state_dict()}
