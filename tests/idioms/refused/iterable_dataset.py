"""`IterableDataset`

Its samples cannot be divided among a different number of ranks, or read again after a recovery.
Give the dataset a length and random access:

```python
class Samples(Dataset):
    def __len__(self): ...
    def __getitem__(self, index): ...
```

Refused: is an IterableDataset: samples cannot be distributed
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


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from dataset


model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(Stream(), batch_size=8), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
