"""Evaluation in the middle of an epoch, on rank 0 only

In eval mode, or without gradients, the wrapped model runs no collectives. The other ranks wait for
rank 0 in their next backward pass.

Group: Evaluation and logging
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
test_x, test_y = dataset[:32]


def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            model.train()
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            if i % 3 == 0 and run.is_main:
                model.eval()
                with torch.no_grad():
                    test_loss = F.mse_loss(model(test_x), test_y)
                print(f"{epoch} {i} {test_loss.item():.4f}")


run.retry(train)
result = model.state_dict()
