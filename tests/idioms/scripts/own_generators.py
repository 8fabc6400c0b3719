"""Generators of random numbers of the script's own

`run.track` keeps generators of torch, NumPy and random. All ranks must draw the same numbers from
one: a coefficient for the batch, noise for the weights. What differs from rank to rank is drawn
from the default generators, which have a seed for each step and rank.

Group: Data
"""

import random

import numpy as np
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
rng = np.random.default_rng(0)
coin = random.Random(0)
generator = torch.Generator().manual_seed(0)
run.track(optimizer=optimizer, rng=rng, coin=coin, generator=generator)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            if coin.random() < 0.5:
                inputs = inputs.flip(1)
            loss = rng.beta(0.4, 0.4) * F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1e-3 * torch.randn(parameter.shape, generator=generator))


run.retry(train)
result = model.state_dict()
