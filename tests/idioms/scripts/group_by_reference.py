"""A parameter group, and a list, used by reference

`head` and `rates` refer to parts of the optimizer and of `run.state`. They stay valid: state that
arrives from another rank or from a checkpoint is written into the existing objects.

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
body, last = model.module[0].parameters(), model.module[2].parameters()
optimizer = torch.optim.SGD([{"params": body}, {"params": last}], lr=0.05, momentum=0.9)
head = optimizer.param_groups[1]
rates = run.state.setdefault("rates", [0.05, 0.01, 0.03])
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(3):
        for inputs, targets in loader:
            head["lr"] = rates[epoch]
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            rates[2] *= 0.9


run.retry(train)
result = {**model.state_dict(), "rates": torch.tensor(run.state["rates"])}
