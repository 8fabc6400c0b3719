"""`for epoch in range(n)` around the loader

After a death, `run.retry` calls its function again. The loader resumes, but the range counts from
0, so the job would train too long. If the loop can be left by `break` or `return`, or `continue`
skips epochs, a warning is logged instead.

```python
for epoch in run.epochs(4):
```

Refused: `for epoch in range(4)` around the loader
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


def train_one_epoch():
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def train():
    for epoch in range(4):
        train_one_epoch()


run.retry(train)
