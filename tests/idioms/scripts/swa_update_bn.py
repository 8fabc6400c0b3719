"""`update_bn` after training

`update_bn` reads the data without training on it: pass a plain `DataLoader`, on all ranks.

Compared: among ranks only, because the statistics of a share depend on its size
Group: Averages and state
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))


run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)

swa_model = AveragedModel(model.module)
run.track(swa=swa_model)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        swa_model.update_parameters(model.module)
    update_bn(DataLoader(dataset, batch_size=32), swa_model)


run.retry(train)
result = {f"swa.{k}": v for k, v in swa_model.state_dict().items()}
