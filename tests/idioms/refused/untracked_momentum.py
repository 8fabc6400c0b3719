"""An untracked average of gradients

A momentum that the script computes itself, in a variable or in an object of its own. After a death,
a variable of the training function begins again, and the next updates depend on it. If the source
does not show that, sums of the last value and of the gradients, or their squares, are recognised.

```python
class Momentum:
    ...
    def state_dict(self):
        return {"velocity": self.velocity}

    def load_state_dict(self, state):
        self.velocity = state["velocity"]


run.track(momentum=momentum)           # or run.untracked("velocity"), if it is only shown
```

Refused: velocity restarts or differs between ranks
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
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
velocity = [torch.zeros_like(p) for p in model.parameters()]


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            model.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            with torch.no_grad():
                for p, v in zip(model.parameters(), velocity, strict=True):
                    v.mul_(0.9).add_(p.grad)
                    p.sub_(v, alpha=0.01)


run.retry(train)
