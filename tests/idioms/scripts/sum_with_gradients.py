"""The mean loss of an epoch, summed with the gradients

`run.sum_with_gradients` sums numbers over all ranks without a collective of its own. The sums are
part of the step: a death loses no rank's part, and an interrupted step counts once.

Group: Evaluation and logging
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(100, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        run.state.setdefault(f"epoch {epoch}", {"loss": 0.0, "samples": 0.0})
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            n = len(inputs)
            sums = run.sum_with_gradients(loss=loss.detach() * n, samples=n)
            loss.backward()
            optimizer.step()
            for name, total in sums.items():
                run.state[f"epoch {epoch}"][name] += total


run.retry(train)
means = [sums["loss"] / sums["samples"] for sums in run.state.values()]
samples = [sums["samples"] for sums in run.state.values()]
result = {**model.state_dict(), "means": torch.tensor(means), "samples": torch.tensor(samples)}
