"""Skipping a batch on one rank

The other ranks would combine their gradients of this step with this rank's gradients of the next
one.

```python
is_bad = run.mean(1.0, bad=float(not torch.isfinite(inputs).all()))["bad"] > 0
if is_bad:                             # the same decision on all ranks
    continue
```

Refused: skip a step on all ranks or on none
Workers: 3
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
x = torch.randn(96, 4)
x[7] = float("nan")
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8), global_batch=12)


def train():
    for inputs, targets in loader:
        if not torch.isfinite(inputs).all():
            continue
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()


run.retry(train)
