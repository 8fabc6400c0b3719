"""An exponential moving average of a large model

Tracked objects of any size are rolled back, or received from a rank that has the correct state.

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
network = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 64), nn.Linear(64, 1))
ema = copy.deepcopy(network).requires_grad_(False)
model = run.wrap(network)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
run.track(optimizer=optimizer, ema=ema)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def update_ema(decay):
    with torch.no_grad():
        for e, p in zip(ema.parameters(), model.parameters()):
            e.lerp_(p, 1 - decay)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update_ema(0.95)
            if loss.item() > 1e6:
                raise RuntimeError("diverged")


run.retry(train)
result = {**model.state_dict(), **{f"ema.{k}": v for k, v in ema.state_dict().items()}}
