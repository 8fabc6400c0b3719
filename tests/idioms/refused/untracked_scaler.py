"""An untracked `GradScaler`

The scale changes during training. A joining node would use a different one.

```python
run.track(optimizer=optimizer, scaler=scaler)
```

Refused: GradScaler scales the gradients of optimizer, but is not tracked
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
scaler = torch.amp.GradScaler("cpu")
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(4):
        for inputs, targets in loader:
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(inputs), targets)).backward()
            scaler.step(optimizer)
            scaler.update()


run.retry(train)
