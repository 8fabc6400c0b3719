"""Leaving the loop by a limit that each rank checks itself

A time limit is reached on one rank first, and so is a target on the rank's own samples. The others
would begin another step, and wait for that rank in its gradients. The same applies to `break` under
`if run.is_main`.

```python
is_late = float(time.monotonic() > end)
if run.mean(1.0, late=is_late)["late"] > 0:           # the same decision on all ranks
    return
```

Refused: left the loop after step
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

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(20):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            if loss.item() < 0.1:
                return


run.retry(train)
