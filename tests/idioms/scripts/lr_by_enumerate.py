"""A learning rate from the index of `enumerate(loader)`

As in the code of MAE and its descendants.

Group: Optimizers and learning rates
"""

import math

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
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
data_loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def adjust_learning_rate(optimizer, epoch):
    """Half a cosine, per iteration, as in the MAE code."""
    lr = 0.01 * 0.5 * (1.0 + math.cos(math.pi * epoch / 2))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def train_one_epoch(epoch):
    for data_iter_step, (samples, targets) in enumerate(data_loader):
        adjust_learning_rate(optimizer, data_iter_step / len(data_loader) + epoch)
        loss = F.mse_loss(model(samples), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train():
    for epoch in run.epochs(2):
        train_one_epoch(epoch)


run.retry(train)
result = dict(model.state_dict())
