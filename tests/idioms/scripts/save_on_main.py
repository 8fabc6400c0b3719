"""Saving on rank 0 with `torch.save`

A separate file in addition to the job's checkpoints. `model.module.state_dict()` uses the parameter
names of the unwrapped model.

Group: The loop
"""

import tempfile
from pathlib import Path

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
folder = Path(tempfile.mkdtemp())


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        if run.is_main:
            state = {"epoch": epoch, "model": model.module.state_dict()}
            torch.save(state, folder / "latest.pt")
            torch.save(model, folder / "whole.pt")


run.retry(train)
result = model.state_dict()
