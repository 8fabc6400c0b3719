"""A dataset that grows between epochs

A loader's order covers the samples that its dataset had when it was registered. Register one loader
for each size ([active learning](../tests/idioms/scripts/active_learning.py)).

```python
loaders = [run.loader(DataLoader(Round(pool, size), batch_size=8)) for size in sizes]
run.track(optimizer=optimizer, pool=pool)
```

Refused: labelled.indices restarts or differs between ranks
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elastic

torch.manual_seed(0)
x = torch.randn(96, 4)
y = x.sin().sum(1, keepdim=True)


class Labelled(Dataset):
    def __init__(self):
        self.indices = list(range(24))

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        return x[self.indices[index]], y[self.indices[index]]


run = elastic.join()
model = run.wrap(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
labelled = Labelled()
loader = run.loader(DataLoader(labelled, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(4):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        labelled.indices += range(len(labelled), len(labelled) + 12)


run.retry(train)
