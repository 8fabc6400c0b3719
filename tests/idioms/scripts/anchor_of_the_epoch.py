"""A penalty on the distance from the weights of the epoch's beginning

Where the loop resumes, `loader.index` is not 0, and the state has what was computed at the epoch's
beginning. The same holds for SVRG's full gradient, a norm, or outputs that are distilled.

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
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(3):
        if loader.index == 0:
            run.state["anchor"] = [p.detach().clone() for p in model.parameters()]
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            with torch.no_grad():
                for parameter, old in zip(model.parameters(), run.state["anchor"], strict=True):
                    parameter.grad += 0.1 * (parameter - old)
            optimizer.step()
            optimizer.zero_grad()


run.retry(train)
result = model.state_dict()
