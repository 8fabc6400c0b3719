"""Averages over an epoch

Sums that must survive a recovery in the middle of an epoch belong in `run.state`. A local
`AverageMeter` restarts with the function.

Inexact: averages to 0.1, because a repeated step may compute its loss with the updated weights
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


def train():
    for epoch in run.epochs(2):
        meter = run.state.setdefault(f"epoch-{epoch}", {"sum": 0.0, "count": 0})
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            meter = run.state[f"epoch-{epoch}"]
            meter["sum"] += run.mean(len(inputs), loss=loss.item())["loss"]
            meter["count"] += 1


run.retry(train)
averages = [meter["sum"] / meter["count"] for meter in run.state.values()]
result = {**model.state_dict(), "averages": torch.tensor(averages)}
