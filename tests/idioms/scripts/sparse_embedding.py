"""Sparse gradients

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


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(20, 4, mode="sum", sparse=True)

    def forward(self, tokens):
        return self.embedding(tokens).sum(1, keepdim=True)


tokens = torch.randint(0, 20, (96, 3))
dataset = TensorDataset(tokens, tokens.double().mean(1, keepdim=True))
model = run.wrap(Bag())
optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.05)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
