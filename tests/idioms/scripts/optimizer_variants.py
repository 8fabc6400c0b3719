"""Other optimizers, and `foreach`

Any `torch.optim.Optimizer` works. This script alternates between two of them from
epoch to epoch.

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
adam = torch.optim.NAdam(model.parameters(), lr=0.01, foreach=True)
sgd = torch.optim.SGD(model.parameters(), lr=0.05, nesterov=True, momentum=0.9, foreach=True)
run.track(adam=adam, sgd=sgd)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        optimizer = adam if epoch == 0 else sgd
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
