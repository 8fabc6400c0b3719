"""Catching the exception of a bad batch on one rank

The other ranks would combine their gradients of this step with this rank's gradients of the next
one. (Errors caused by a failed peer may be caught: the loop raises them again at the end of the
step.)

```python
try:
    loss = loss_of(inputs, targets)
except ValueError:
    loss = None
if run.mean(1.0, bad=float(loss is None))["bad"] > 0:      # the same decision on all ranks
    continue
loss.backward()
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
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
dataset.tensors[1][67] = 100.0

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8), global_batch=12)


def loss_of(inputs, targets):
    if targets.abs().max() > 10:
        raise ValueError("a corrupt sample")
    return F.mse_loss(model(inputs), targets)


def train():
    for inputs, targets in loader:
        try:
            loss = loss_of(inputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        except ValueError as error:
            print("skipping a batch:", error)
            continue


run.retry(train)
