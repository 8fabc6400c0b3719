"""Manual SGD under `no_grad`

As in the PyTorch tutorials, without an optimizer.

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
learning_rate = 0.1


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= learning_rate * p.grad
                    p.grad = None


run.retry(train)
result = model.state_dict()
