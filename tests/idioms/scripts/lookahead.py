"""Lookahead: slow weights updated every few steps

Group: Optimizers and learning rates
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
network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
slow = copy.deepcopy(network).requires_grad_(False)
model = run.wrap(network)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
run.track(slow=slow)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    run.state.setdefault("steps", 0)
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            run.state["steps"] += 1
            if run.state["steps"] % 5 == 0:
                with torch.no_grad():
                    for s, p in zip(slow.parameters(), model.parameters()):
                        s.lerp_(p, 0.5)
                        p.copy_(s)


run.retry(train)
result = model.state_dict()
