"""Leaving a step before its last micro-batch

The remaining samples of the step would be lost.

```python
for step in run.steps(loader):
    for inputs, targets in step:       # read every micro-batch
        ...
```

Refused: was left before the last of its
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
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
data = DataLoader(dataset, batch_size=8, shuffle=True)
loader = run.loader(data, global_batch=12, micro_batch=3)


def train():
    for epoch in run.epochs(1):
        for step in run.steps(loader):
            for inputs, targets in step:
                step.backward(F.mse_loss(model(inputs), targets))
                break


run.retry(train)
