"""A target network: `deepcopy` of the wrapped model

As in DQN and BYOL. A tracked copy is saved and rolled back.

Group: Models
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
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
target = copy.deepcopy(model)
target.requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer, target=target)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            with torch.no_grad():
                bootstrap = targets + 0.5 * target(inputs)
            loss = F.smooth_l1_loss(model(inputs), bootstrap)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for t, p in zip(target.parameters(), model.parameters()):
                    t.mul_(0.95).add_(p, alpha=0.05)


run.retry(train)
result = {**model.state_dict(), **{f"target.{k}": v for k, v in target.state_dict().items()}}
