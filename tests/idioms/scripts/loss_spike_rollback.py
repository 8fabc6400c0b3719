"""Rolling back to a snapshot of the weights

A tracked copy of the weights is loaded back into the model, for example after a loss spike.

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
network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
good = copy.deepcopy(network)
model = run.wrap(network)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
run.track(good=good)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(3):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            if i == 3:
                good.load_state_dict(model.module.state_dict())
            if i == 6:
                model.module.load_state_dict(good.state_dict())


run.retry(train)
result = model.state_dict()
