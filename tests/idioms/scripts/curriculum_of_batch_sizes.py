"""A batch size that changes between epochs

Create one loader per batch size before the loop.

Group: Data
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
stages = {0: 6, 1: 12, 2: 24}
loaders = {
    epoch: run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=size)
    for epoch, size in stages.items()
}


def train():
    for epoch in run.epochs(3):
        for inputs, targets in loaders[epoch]:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
