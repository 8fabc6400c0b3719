"""Clamping weights (WGAN)

Weight changes made within a step but outside an optimizer are rolled back, too.

Group: Optimizers and learning rates
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = -(model(inputs) * targets).mean()
            loss.backward()
            optimizer.step()
            for p in model.parameters():
                p.data.clamp_(-0.3, 0.3)


run.retry(train)
result = model.state_dict()
