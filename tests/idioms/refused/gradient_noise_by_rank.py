"""Adding rank-dependent noise to gradients

The default generators differ between ranks within a step, so the weights would diverge.

```python
generator = torch.Generator().manual_seed(step.number)      # for step in run.steps(loader)
noise = torch.randn(p.shape, generator=generator)
```

Refused: has different weights from rank 0
Workers: 3
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            for p in model.parameters():
                p.grad.add_(0.01 * torch.randn_like(p.grad))
            optimizer.step()


run.retry(train)
