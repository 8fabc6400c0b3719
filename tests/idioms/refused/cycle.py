"""`itertools.cycle(loader)`

It caches the batches of the first epoch and replays them, so the job cannot track its position.

```python
def endless(loader):
    while True:
        yield from loader
```

Refused: itertools.cycle(loader) repeats the batches of the first epoch
"""

import itertools

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
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for i, (inputs, targets) in enumerate(itertools.cycle(loader)):
        if i == 20:
            break
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()


run.retry(train)
