"""Averages over an epoch

Sums that must survive a recovery in the middle of an epoch belong in `run.state`. Those in
variables, such as a local `AverageMeter`, begin again with the function.

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
        run.state["total"] = 0.0
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            run.state["total"] += run.mean(len(inputs), loss=loss.item())["loss"]
        run.state[f"average-{epoch}"] = run.state["total"] / len(loader)


run.retry(train)
averages = [run.state[f"average-{epoch}"] for epoch in range(2)]
result = {**model.state_dict(), "averages": torch.tensor(averages)}
