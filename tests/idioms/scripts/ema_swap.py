"""Evaluation with averaged weights, swapped in and out

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
shadow = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
shadow.load_state_dict(model.module.state_dict())
run.track(shadow=shadow)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def swap():
    for p, s in zip(model.parameters(), shadow.parameters()):
        p.data, s.data = s.data, p.data


def train():
    for epoch in run.epochs(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            with torch.no_grad():
                for s, p in zip(shadow.parameters(), model.parameters()):
                    s.lerp_(p, 0.1)
        swap()
        model.eval()
        with torch.no_grad():
            error = F.mse_loss(model(x), dataset.tensors[1])
        model.train()
        swap()
        run.state[f"error-{epoch}"] = error.item()


run.retry(train)
errors = {key: torch.tensor(value) for key, value in run.state.items()}
result = {**model.state_dict(), **errors}
