"""`random_split` without a seed

Each rank would draw another split, and train on validation samples of the others.

```python
generator = torch.Generator().manual_seed(0)
train_set, val_set = random_split(dataset, [80, 16], generator=generator)
```

Workers: 2
Refused: the data position was saved with subset=
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import elastic

x = torch.randn(96, 4)
train_set, val_set = random_split(TensorDataset(x, x.sin().sum(1, keepdim=True)), [80, 16])

run = elastic.join()
model = run.wrap(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(train_set, batch_size=8, shuffle=True), global_batch=16)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
