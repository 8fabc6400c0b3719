"""An existing `DistributedSampler`

The sampler can stay. Its order and seed are kept, and each world reassigns the samples to its
ranks. The number of replicas and the rank passed to it are ignored.

Group: Data
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True, seed=7)
loader = run.loader(DataLoader(dataset, batch_size=4, sampler=sampler), global_batch=12)


def train():
    for epoch in run.epochs(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
