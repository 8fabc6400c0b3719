"""A generator around the loader that keeps a value from batch to batch

As the rest of the sequences before, which it puts in front of the next ones, or a scale that falls.
A generator is created again where the loop resumes, and begins with its first value. Keep it in
`run.state`, as a variable of the loop.

Refused: `scale *= 0.9` in annealed
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


def annealed(batches):
    scale = 1.0
    for inputs, targets in batches:
        yield inputs * scale, targets
        scale *= 0.9


def train():
    for epoch in run.epochs(2):
        for inputs, targets in annealed(loader):
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
