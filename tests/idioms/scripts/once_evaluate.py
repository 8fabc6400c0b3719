"""An evaluation between steps with `run.once`

The state that it changes (the best loss, a count for early stopping) is kept once it has ended on
all ranks. If a death interrupts it, it is repeated without the step before it.

Group: Evaluation and logging
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
held_out = TensorDataset(x[:17], x[:17].sin().sum(1, keepdim=True))

run = elastic.join()
network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
model, best = run.wrap(network), copy.deepcopy(network).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer, best=best)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
test_loader = run.shard(DataLoader(held_out, batch_size=4))
run.state.update(best=float("inf"), patience=0, evaluations=0)


def evaluate():
    model.eval()
    total, seen = 0.0, 0
    with torch.no_grad():
        for inputs, targets in test_loader:
            total += F.mse_loss(model(inputs), targets, reduction="sum").item()
            seen += len(inputs)
    model.train()
    loss = run.mean(seen, loss=total / max(1, seen))["loss"]
    run.state["evaluations"] += 1
    run.state["patience"] += 1
    if loss < run.state["best"]:
        run.state["best"], run.state["patience"] = loss, 0
        best.load_state_dict(network.state_dict())
    return loss


def evaluate_some(step):
    if step.number % 5 == 4:
        run.once("evaluate", evaluate)


run.after_step(evaluate_some)


def train():
    for epoch in run.epochs(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        run.state["last"] = run.once("at the end of an epoch", evaluate)
        if run.state["patience"] > 2:
            break


run.retry(train)
result = {
    **model.state_dict(),
    **{f"best.{name}": value for name, value in best.state_dict().items()},
    **{name: torch.tensor(value) for name, value in run.state.items()},
}
