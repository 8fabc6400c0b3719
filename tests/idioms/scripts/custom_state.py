"""A custom tracked object

Any object with `state_dict` and `load_state_dict`.

Group: Averages and state
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


class RunningMean:
    def __init__(self):
        self.total, self.count = torch.zeros(4), 0

    def update(self, value):
        self.total += value
        self.count += 1

    def state_dict(self):
        return {"total": self.total, "count": self.count}

    def load_state_dict(self, state):
        self.total, self.count = state["total"].clone(), state["count"]


model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
statistics = RunningMean()
run.track(optimizer=optimizer, statistics=statistics)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            statistics.update(model.module[0].weight.detach()[0])


run.retry(train)
result = {**model.state_dict(), "total": statistics.total, "count": torch.tensor(statistics.count)}
