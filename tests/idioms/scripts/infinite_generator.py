"""An infinite generator over the loader

`def forever(): while True: yield from loader`, with the step count in `run.state`.

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


def forever():
    while True:
        yield from loader


def train():
    batches = forever()
    while run.state.get("step", 0) < 20:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        run.state["step"] = run.state.get("step", 0) + 1


run.retry(train)
result = model.state_dict()
