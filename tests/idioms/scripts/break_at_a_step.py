"""Stopping at a given step

`run.state` holds the global step number, so the limit applies to the whole job and not to one
attempt. Check it before the step: if a peer dies while ranks return, the function is called again.

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
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
max_iters = 13


def train():
    run.state.setdefault("iteration", 0)
    for epoch in run.epochs(100):
        for inputs, targets in loader:
            if run.state["iteration"] >= max_iters:
                return
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            run.state["iteration"] += 1


run.retry(train)
result = {**model.state_dict(), "iteration": torch.tensor(run.state["iteration"])}
