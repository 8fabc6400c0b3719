"""`generator`, `worker_init_fn` and persistent workers

The options of the `DataLoader` are kept. The random numbers of a sample do not depend on the worker
that reads it.

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


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


generator = torch.Generator()
generator.manual_seed(0)


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, i):
        return x[i] + 0.1 * np.random.randn(), x[i].sin().sum(
            0, keepdim=True
        ) + 0.1 * random.random()


dataset = Noisy()
run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run.track(optimizer=optimizer)
loader = run.loader(
    DataLoader(
        dataset,
        batch_size=8,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=4,
        worker_init_fn=seed_worker,
        generator=generator,
        pin_memory=False,
    ),
    global_batch=12,
)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
