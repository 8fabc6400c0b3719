"""Early stopping on the validation loss

The best loss and the patience counter are in `run.state`, so they are identical on all ranks and
survive failures. `break` leaves the loop over epochs, not the loop over batches.

Group: Evaluation and logging
"""

import math

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
val_loader = run.shard(DataLoader(dataset, batch_size=16))


def validate():
    model.eval()
    total = sum(F.mse_loss(model(a), b, reduction="sum").item() for a, b in val_loader)
    seen = sum(len(a) for a, _ in val_loader)
    model.train()
    return run.mean(seen, loss=total / max(seen, 1))["loss"]


def train():
    run.state.setdefault("best", math.inf)
    run.state.setdefault("bad_epochs", 0)
    for epoch in run.epochs(8):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        loss = validate()
        if loss < run.state["best"] - 0.2:
            run.state["best"], run.state["bad_epochs"] = loss, 0
        else:
            run.state["bad_epochs"] += 1
        if run.state["bad_epochs"] >= 1:
            break


run.retry(train)
result = {**model.state_dict(), "best": torch.tensor(run.state["best"])}
