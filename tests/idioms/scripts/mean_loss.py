"""Logging the loss with `run.mean`

Inexact: sum to 0.2, because a repeated step may compute its loss with the updated weights
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
        for step in run.steps(loader):
            for inputs, targets in step:
                loss = F.mse_loss(model(inputs), targets)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            logged = run.mean(step.samples, loss=loss.item())
            run.state["sum"] = run.state.get("sum", 0.0) + logged["loss"]


run.retry(train)
result = {**model.state_dict(), "sum": torch.tensor(run.state["sum"])}
