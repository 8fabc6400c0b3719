"""Evaluation at the end of each epoch, on all ranks

`run.shard` distributes the test set without padding. `run.mean` averages over all ranks.

Group: Evaluation and logging
"""

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
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
test_loader = run.shard(DataLoader(TensorDataset(*dataset[:50]), batch_size=7))


def evaluate():
    model.eval()
    error, seen = 0.0, 0
    with torch.no_grad():
        for inputs, targets in test_loader:
            error += F.mse_loss(model(inputs), targets, reduction="sum").item()
            seen += len(inputs)
    model.train()
    return run.mean(seen, error=error / max(seen, 1))["error"]


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        run.state[f"error-{epoch}"] = evaluate()


run.retry(train)
errors = {key: torch.tensor(value) for key, value in run.state.items()}
result = {**model.state_dict(), **errors}
