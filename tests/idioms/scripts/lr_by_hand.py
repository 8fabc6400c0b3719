"""Setting the learning rate manually

As in the ImageNet example: a function of the epoch, written to the optimizer's parameter groups.

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def adjust_learning_rate(epoch):
    lr = 0.1 * (0.1 ** (epoch // 1))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def train():
    for epoch in run.epochs(2):
        adjust_learning_rate(epoch)
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
