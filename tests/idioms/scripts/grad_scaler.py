"""An enabled `GradScaler`

The scale is the same on all ranks, because it depends on reduced gradients.

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
run.track(optimizer=optimizer, scaler=scaler)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


run.retry(train)
result = {**model.state_dict(), "scale": torch.tensor(scaler.get_scale())}
