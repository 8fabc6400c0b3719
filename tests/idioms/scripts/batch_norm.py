"""BatchNorm

As in stock DDP, each rank computes statistics over its own share, and the running averages of rank
0 are used. Both depend on the number of workers. On GPUs,
`nn.SyncBatchNorm.convert_sync_batchnorm(model)` before `run.wrap` computes statistics over the
global batch.

Compared: among ranks only, because the statistics of a share depend on its size
Group: Models
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
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()


run.retry(train)
result = dict(model.named_parameters())
