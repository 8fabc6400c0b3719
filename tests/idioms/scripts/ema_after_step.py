"""An exponential moving average in `run.after_step`

The callback runs once per committed step, even if a failure interrupts it.

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
ema = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
ema.load_state_dict(model.module.state_dict())
run.track(ema=ema)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def update_ema(step):
    with torch.no_grad():
        for average, parameter in zip(ema.parameters(), model.parameters()):
            average.mul_(0.9).add_(parameter, alpha=0.1)


run.after_step(update_ema)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()


run.retry(train)
result = {**model.state_dict(), **{f"ema.{k}": v for k, v in ema.state_dict().items()}}
