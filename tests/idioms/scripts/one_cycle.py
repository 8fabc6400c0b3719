"""`OneCycleLR`, stepped after each batch

`len(loader)` is the number of steps in a full epoch at any world size.

Group: Optimizers and learning rates
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
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=0.1, epochs=2, steps_per_epoch=len(loader)
)
run.track(optimizer=optimizer, scheduler=scheduler)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()


run.retry(train)
result = {**model.state_dict(), "lr": torch.tensor(scheduler.get_last_lr())}
