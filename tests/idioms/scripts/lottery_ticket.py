"""Pruning in rounds, with a reset of the remaining weights (lottery tickets)

`prune.identity` before `run.wrap` creates the masks, which are buffers. Training changes them in
place: parameters and buffers that are added later are refused. `run.state` records the last round
that was pruned, so a resumed epoch does not prune again.

Group: Models
"""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
layers = [layer for layer in network if isinstance(layer, nn.Linear)]
for layer in layers:
    prune.identity(layer, "weight")
initial = copy.deepcopy([p.detach() for p in network.parameters()])
model = run.wrap(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=24)


@torch.no_grad()
def prune_and_reset(amount):
    for layer in layers:
        size = layer.weight_orig.abs().masked_fill(layer.weight_mask == 0, math.inf).flatten()
        remaining = int(layer.weight_mask.sum())
        layer.weight_mask.view(-1)[size.argsort()[: int(amount * remaining)]] = 0
    for p, value in zip(model.parameters(), initial):
        p.copy_(value)
    optimizer.state.clear()


def train():
    run.state.setdefault("pruned", 0)
    for epoch in run.epochs(4):
        if epoch % 2 == 0 and run.state["pruned"] < epoch:
            prune_and_reset(0.3)
            run.state["pruned"] = epoch
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
