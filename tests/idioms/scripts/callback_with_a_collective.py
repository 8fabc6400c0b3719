"""A callback with a collective in `run.after_step`

The step is committed before the callback runs. An interrupted callback runs again in the next
world.

Group: Averages and state
"""

import torch
import torch.distributed as dist
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def log_norm(step):
    norm = torch.stack([p.detach().norm() for p in model.parameters()]).sum()
    dist.all_reduce(norm)
    norm /= dist.get_world_size()
    run.state["norm"] = run.state.get("norm", 0.0) + norm.item()
    run.state["calls"] = run.state.get("calls", 0) + 1


run.after_step(log_norm)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
result = {
    **model.state_dict(),
    "norm": torch.tensor(run.state["norm"]),
    "calls": torch.tensor(run.state["calls"]),
}
