"""`optimizer.step(closure)` with Adam, and a scheduler"""

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
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
run.track(optimizer=optimizer, scheduler=scheduler)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def training_step(inputs, targets):
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    return loss


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.step(lambda: training_step(inputs, targets))
            scheduler.step()


run.retry(train)
result = model.state_dict()
