"""`torch.optim.swa_utils.AveragedModel`

Create it from the wrapped model and track it.

Group: Averages and state
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
run.track(optimizer=optimizer, ema=ema_model)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            ema_model.update_parameters(model)


run.retry(train)
result = {**model.state_dict(), **{f"ema.{k}": v for k, v in ema_model.state_dict().items()}}
