"""Parameters that no loss depends on

DDP waits for the gradients of all trained parameters. The error names those without one.

```python
model = run.wrap(network, find_unused_parameters=True)     # or freeze them
```

Refused: these parameters got no gradient: unused.weight, unused.bias
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, inputs):
        return self.used(inputs)


run = elastic.join()
model = run.wrap(Network())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(4):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
