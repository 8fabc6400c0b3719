"""Counting batches with `enumerate`

After a recovery the loop resumes in the middle of the epoch. `start=loader.index` keeps the batch
index correct.

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


def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % 5 == 0:
                print(f"epoch {epoch} [{i}/{len(loader)}] loss {loss.item():.4f}")
            run.state.setdefault("batches", []).append([epoch, i])


run.retry(train)
result = {**model.state_dict(), "batches": torch.tensor(run.state["batches"])}
