"""BatchNorm with frozen statistics

As in detection and fine-tuning: the BatchNorm layers stay in eval mode while their affine
parameters are trained.

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
network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
network(x)  # some statistics
model = run.wrap(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def freeze_batch_norm(module):
    if isinstance(module, nn.BatchNorm1d):
        module.eval()


def train():
    for epoch in run.epochs(2):
        model.train()
        model.apply(freeze_batch_norm)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
