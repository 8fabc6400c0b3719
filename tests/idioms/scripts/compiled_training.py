"""`torch.compile` of a training step, an optimizer's update and its scheduler

As in PyTorch's tutorials. The learning rate is a tensor: a new value causes no recompilation.
Calls of this package end the compiled graph, so `fullgraph=True` is not possible around them.

Group: Precision and compilation
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
optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
run.track(optimizer=optimizer, scheduler=scheduler)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


@torch.compile(backend="eager", dynamic=True)
def gradients_of(inputs, targets):
    optimizer.zero_grad()
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    run.log(loss=run.mean(len(inputs), loss=loss.detach())["loss"])


@torch.compile(backend="eager")
def update():
    optimizer.step()
    scheduler.step()


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            gradients_of(inputs, targets)
            update()


run.retry(train)
result = {**model.state_dict(), "lr": torch.as_tensor(scheduler.get_last_lr()[0])}
