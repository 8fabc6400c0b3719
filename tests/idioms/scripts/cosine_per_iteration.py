"""A learning rate per iteration, by hand and by `CosineAnnealingWarmRestarts`

`enumerate(loader, start=loader.index)`: the rate is that of the step, also when the loop resumes in
the middle of an epoch.

Group: Optimizers and learning rates
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh()))
head = run.wrap(nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
head_optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
scheduler = CosineAnnealingWarmRestarts(head_optimizer, T_0=1)
run.track(optimizer=optimizer, head_optimizer=head_optimizer, scheduler=scheduler)
data_loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def adjust_learning_rate(optimizer, epoch):
    lr = 0.01 * 0.5 * (1.0 + math.cos(math.pi * epoch / 2))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def train():
    for epoch in run.epochs(2):
        for i, (samples, targets) in enumerate(data_loader, start=data_loader.index):
            adjust_learning_rate(optimizer, i / len(data_loader) + epoch)
            loss = F.mse_loss(head(model(samples)), targets)
            optimizer.zero_grad()
            head_optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            head_optimizer.step()
            scheduler.step(epoch + i / len(data_loader))


run.retry(train)
result = {**model.state_dict(), **head.state_dict(), "lr": torch.tensor(scheduler.get_last_lr())}
