"""Gradient accumulation with `no_sync`

Gradients are reduced only in the last backward pass of each optimizer step.

Group: Gradients
"""

import contextlib

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
accumulation_steps = 4


def train():
    for epoch in run.epochs(2):
        optimizer.zero_grad()
        for i, (inputs, targets) in enumerate(loader):
            is_last = (i + 1) % accumulation_steps == 0
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = F.mse_loss(model(inputs), targets)
                (loss / accumulation_steps).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()


run.retry(train)
result = model.state_dict()
