"""Manual SGD on `.data`

Group: Optimizers and learning rates
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
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            model.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            for f in model.parameters():
                f.data.sub_(f.grad.data * 0.1)


run.retry(train)
result = model.state_dict()
