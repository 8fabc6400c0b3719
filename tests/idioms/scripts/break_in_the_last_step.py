"""A loop that is left in the last step of its epoch

What follows the loop belongs to that step, also `run.once`, until the next loop begins: a death
repeats it together with the step.

Group: The loop
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(72, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def evaluate():
    run.state["noise"] = run.state.get("noise", 0.0) + torch.rand(()).item()
    return run.mean(1.0, loss=1.0)


def count_step(step):
    run.state["called"] = run.state.get("called", 0.0) + run.mean(1.0, steps=1.0)["steps"]


def train():
    run.after_step(count_step)
    run.state.setdefault("epoch", 0)
    while run.state["epoch"] < 3:
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            if i + 1 == len(loader):
                break
        run.state["epoch"] += 1
        run.once("evaluate", evaluate)


run.retry(train)
counts = {name: torch.tensor(run.state[name]) for name in ("epoch", "called", "noise")}
result = {**model.state_dict(), **counts}
