"""Unfreezing layers during training

DDP is rebuilt when the set of trainable parameters changes. Stock DDP would silently leave the
gradients of newly trainable parameters unreduced. Set `requires_grad` in every epoch, so that a
replacement that joins later trains the same parameters.

Group: Models
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
backbone = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
head = nn.Linear(8, 1)
model = run.wrap(nn.Sequential(backbone, head))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def set_trainable(epoch):
    for parameter in backbone.parameters():
        parameter.requires_grad = epoch >= 1


def train():
    for epoch in run.epochs(2):
        set_trainable(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
