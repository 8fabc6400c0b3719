"""`scheduler.step(epoch + i / iters)` with the index of `enumerate(loader)`

As in the documentation of `CosineAnnealingWarmRestarts`.

Group: Optimizers and learning rates
"""

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
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = CosineAnnealingWarmRestarts(optimizer, T_0=1)
run.track(optimizer=optimizer, scheduler=scheduler)
dataloader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
iters = len(dataloader)


def train():
    for epoch in run.epochs(2):
        for i, (inputs, labels) in enumerate(dataloader):
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), labels)
            loss.backward()
            optimizer.step()
            scheduler.step(epoch + i / iters)


run.retry(train)
result = {**model.state_dict(), "rate": torch.tensor(scheduler.get_last_lr())}
