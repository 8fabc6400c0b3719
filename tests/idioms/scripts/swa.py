"""Stochastic weight averaging per epoch

`AveragedModel` and `SWALR` in the last epochs.

Group: Averages and state
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
swa_model = AveragedModel(model.module)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=1)
run.track(optimizer=optimizer, swa=swa_model, scheduler=scheduler, swa_scheduler=swa_scheduler)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(4):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        if epoch >= 2:
            swa_model.update_parameters(model.module)
            swa_scheduler.step()
        else:
            scheduler.step()


run.retry(train)
result = {**model.state_dict(), **{f"swa.{k}": v for k, v in swa_model.state_dict().items()}}
