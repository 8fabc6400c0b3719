"""Gradient accumulation with a shorter last group

`or i + 1 == len(loader)` needs the batch index within the epoch: use `start=loader.index`.

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
accumulate = 3


def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            loss = F.mse_loss(model(inputs), targets)
            loss = loss / accumulate
            loss.backward()
            if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()


run.retry(train)
result = model.state_dict()
