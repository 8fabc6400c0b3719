"""Counters in `run.state`

JSON values that are saved, restored, and rolled back together with the model. All ranks must write
the same values: a value written only by rank 0 is lost when that rank dies.

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
    run.state.setdefault("samples", 0)
    run.state.setdefault("history", [])
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            run.state["samples"] += 12
        run.state["history"].append({"epoch": epoch, "samples": run.state["samples"]})


run.retry(train)
history = [entry["samples"] for entry in run.state["history"]]
result = {**model.state_dict(), "history": torch.tensor(history)}
