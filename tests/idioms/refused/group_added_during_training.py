"""`add_param_group` during training

As in gradual unfreezing. Neither a joining node nor a checkpoint could restore the optimizer: their
scripts begin without the group. Frozen parameters may be in an optimizer from the beginning
([unfreezing](../tests/idioms/scripts/unfreeze.py)).

```python
optimizer = torch.optim.AdamW([                # before run.retry
    {"params": head.parameters()},
    {"params": backbone.parameters(), "lr": 1e-4},
])
```

Refused: optimizer got more parameters during training
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
backbone = nn.Sequential(nn.Linear(4, 8), nn.Tanh()).requires_grad_(False)
head = nn.Linear(8, 1)
model = run.wrap(nn.Sequential(backbone, head))
optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(4):
        if epoch == 1:
            backbone.requires_grad_(True)
            optimizer.add_param_group({"params": backbone.parameters(), "lr": 1e-4})
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
