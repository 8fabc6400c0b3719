"""`train(epoch)` and `test(epoch)`, as in the MNIST example"""

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
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
run.track(optimizer=optimizer, scheduler=scheduler)
train_loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
test_loader = run.shard(DataLoader(dataset, batch_size=32))


def train(epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader, start=train_loader.index):
        optimizer.zero_grad()
        loss = F.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % 4 == 0 and run.is_main:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}] {loss.item():.6f}")


def test():
    model.eval()
    test_loss = 0.0
    with torch.no_grad():
        for data, target in test_loader:
            test_loss += F.mse_loss(model(data), target, reduction="sum").item()
    print("Test loss", run.mean(1, loss=test_loss))


def main():
    for epoch in run.epochs(2):
        train(epoch)
        test()
        scheduler.step()


run.retry(main)
result = model.state_dict()
