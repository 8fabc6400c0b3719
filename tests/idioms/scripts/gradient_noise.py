"""Gradient noise

Random numbers that must be identical on all ranks come from a separate generator seeded with the
step. The default generators differ between ranks.

Group: Gradients
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


def train():
    for epoch in run.epochs(2):
        for step in run.steps(loader):
            for inputs, targets in step:
                optimizer.zero_grad()
                F.mse_loss(model(inputs), targets).backward()
            generator = torch.Generator().manual_seed(step.number)
            for p in model.parameters():
                p.grad.add_(0.01 * torch.randn(p.shape, generator=generator))
            optimizer.step()


run.retry(train)
result = model.state_dict()
