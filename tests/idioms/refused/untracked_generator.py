"""Random numbers from a generator that is not tracked

It would draw other numbers where a step is repeated, and begin again on a joining node and after a
restart.

```python
run.track(rng=rng)                     # all ranks draw the same numbers from it
lam = np.random.beta(0.4, 0.4)         # or each its own: from the default generators
```

Refused: what rng draws next restarts
Group: Averages and state
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sum(1, keepdim=True))
rng = np.random.default_rng(0)

run = elastic.join()
model = run.wrap(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8))


def train():
    for epoch in run.epochs(1):
        for inputs, targets in loader:
            lam = float(rng.beta(0.4, 0.4))
            loss = lam * F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


run.retry(train)
