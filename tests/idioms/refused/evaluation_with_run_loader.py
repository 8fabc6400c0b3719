"""Evaluation with `run.loader`

Every batch of a `run.loader` is a training step of the job. After a recovery, an evaluation pass
would resume in the middle and lose the sums of the earlier batches. The same applies to
`update_bn`.

```python
valid_loader = run.shard(DataLoader(valid_set, batch_size=8))
```

Refused: ran without gradients or in eval mode
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
valid_loader = run.loader(DataLoader(dataset, batch_size=8), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        model.eval()
        error = 0.0
        with torch.no_grad():
            for inputs, targets in valid_loader:
                error += F.mse_loss(model(inputs), targets, reduction="sum").item()
        model.train()


run.retry(train)
