"""A second backward pass over one forward pass that reaches only some layers

DDP sums the gradients of a pass in buckets of several parameters, so a pass must reach all of them,
unless its gradients are cleared before the next update ([TD3](../tests/idioms/scripts/td3.py)).

```python
(loss + auxiliary).backward()
```

Refused: has computed gradients of only some of its parameters
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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        self.features = self.body(x).tanh()
        return self.head(self.features)


run = elastic.join()
model = run.wrap(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(1):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward(retain_graph=True)
            if loader.index > 4:
                auxiliary = model.module.features.pow(2).mean()
                auxiliary.backward()
            optimizer.step()


run.retry(train)
