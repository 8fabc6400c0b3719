"""A single pass, then an evaluation

Without `run.epochs`. After a death in the evaluation, `run.retry` calls its function again, and the
pass, which is complete, yields nothing.

Group: The loop
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
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
train_loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
eval_loader = run.shard(DataLoader(dataset, batch_size=16))


def evaluate():
    model.eval()
    total, seen = 0.0, 0
    with torch.no_grad():
        for inputs, targets in eval_loader:
            total += F.mse_loss(model(inputs), targets, reduction="sum").item()
            seen += len(inputs)
    model.train()
    return run.mean(seen, loss=total / max(seen, 1))["loss"]


def train():
    for inputs, targets in train_loader:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return evaluate()


loss = run.retry(train)
result = {**model.state_dict(), "loss": torch.tensor(loss)}
