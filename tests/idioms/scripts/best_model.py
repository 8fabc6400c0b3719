"""Keeping the best model

The best weights are in a tracked module, and their score is in `run.state`.

Group: Averages and state
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
best = copy.deepcopy(network)
model = run.wrap(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
run.track(optimizer=optimizer, best=best)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=24)
val_loader = run.shard(DataLoader(dataset, batch_size=10))


@torch.no_grad()
def validate():
    model.eval()
    error, seen = 0.0, 0
    for inputs, targets in val_loader:
        error += F.mse_loss(model(inputs), targets, reduction="sum").item()
        seen += len(inputs)
    model.train()
    return run.mean(seen, error=error / max(seen, 1))["error"]


def train():
    for epoch in run.epochs(4):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        error = validate()
        if error < run.state.get("best", 1e9):
            run.state["best"] = error
            best.load_state_dict(model.module.state_dict())


run.retry(train)
result = {**best.state_dict(), "best": torch.tensor(run.state["best"])}
