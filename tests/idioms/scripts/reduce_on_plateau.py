"""`ReduceLROnPlateau`

Every rank must pass the same value: the `run.mean` of the validation loss.

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
run.track(optimizer=optimizer, scheduler=scheduler)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=24)
val_loader = run.shard(DataLoader(dataset, batch_size=16))


def train():
    for epoch in run.epochs(5):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        model.eval()
        losses = [(len(a), F.mse_loss(model(a), b).item()) for a, b in val_loader]
        model.train()
        seen = sum(n for n, _ in losses)
        loss = run.mean(seen, loss=sum(n * v for n, v in losses) / max(1, seen))["loss"]
        scheduler.step(loss)


run.retry(train)
result = {**model.state_dict(), "lr": torch.tensor(scheduler.get_last_lr())}
