"""Gradient accumulation for one of two optimizers

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
body = torch.optim.SGD(model.module[0].parameters(), lr=0.1)
head = torch.optim.SGD(model.module[2].parameters(), lr=0.1)
run.track(body=body, head=head)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            F.mse_loss(model(inputs), targets).backward()
            head.step()
            head.zero_grad()
            if (i + 1) % 2 == 0:
                body.step()
                body.zero_grad()


run.retry(train)
result = model.state_dict()
