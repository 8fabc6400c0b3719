"""Sharpness-aware minimisation: two passes per step

The script removes the perturbation before the wrapped optimizer steps. A failure in between is
detected.

Group: Optimizers and learning rates
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def perturb(rho):
    params = [p for p in model.parameters() if p.grad is not None]
    norm = torch.norm(torch.stack([p.grad.norm() for p in params]))
    eps = []
    with torch.no_grad():
        for p in params:
            e = p.grad * (rho / (norm + 1e-12))
            p.add_(e)
            eps.append((p, e))
    return eps


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            eps = perturb(0.05)
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            with torch.no_grad():
                for p, e in eps:
                    p.sub_(e)
            optimizer.step()


run.retry(train)
result = model.state_dict()
