"""A target network updated every few steps

The counter that triggers the copy is in `run.state`.

Group: Models
"""

import copy

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
network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
target = copy.deepcopy(network).requires_grad_(False)
model = run.wrap(network)
optimizer = torch.optim.RMSprop(model.parameters(), lr=0.005)
run.track(optimizer=optimizer, target=target)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    run.state.setdefault("updates", 0)
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets + 0.5 * target(inputs))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.state["updates"] += 1
            if run.state["updates"] % 5 == 0:
                target.load_state_dict(model.module.state_dict())


run.retry(train)
result = {**model.state_dict(), **{f"target.{k}": v for k, v in target.state_dict().items()}}
