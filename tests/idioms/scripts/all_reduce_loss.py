"""Logging the loss with `dist.all_reduce`

The script may call collectives anywhere in the loop. If a peer fails during one of them, the job
recovers and completes the step in the next world.

Inexact: loss to 0.5, because a repeated step may compute its loss with the updated weights
Group: Evaluation and logging
"""

import torch
import torch.distributed as dist
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                total = torch.stack([loss * len(inputs), torch.tensor(float(len(inputs)))])
                dist.all_reduce(total)
            run.state["loss"] = run.state.get("loss", 0.0) + (total[0] / total[1]).item()


run.retry(train)
result = {**model.state_dict(), "loss": torch.tensor(run.state["loss"])}
