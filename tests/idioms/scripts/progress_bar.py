"""A progress bar

`tqdm(loader, initial=loader.index, total=len(loader))`: `len(loader)` is the length of a full
epoch, and the bar resumes at the current step.

Group: The loop
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
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


class Bar:
    """As much of tqdm as this needs."""

    def __init__(self, iterable, *, total, initial=0):
        self.iterable, self.total, self.n = iterable, total, initial

    def __iter__(self):
        for item in self.iterable:
            yield item
            self.n += 1

    def set_postfix(self, **values):
        print(f"{self.n}/{self.total}", values, end="\r")


def train():
    for epoch in run.epochs(2):
        bar = Bar(loader, initial=loader.index, total=len(loader))
        for inputs, targets in bar:
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            bar.set_postfix(loss=loss.item())
        assert bar.n == bar.total


run.retry(train)
result = model.state_dict()
