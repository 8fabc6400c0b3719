"""A custom batch sampler

Every world divides the batches among its ranks. Batches that a sampler builds itself cannot be
divided.

```python
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=24)
```

Refused: which cannot be distributed
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()


class ByLength:
    def __iter__(self):
        return iter([[i, i + 1] for i in range(0, 96, 2)])

    def __len__(self):
        return 48


loader = run.loader(DataLoader(dataset, batch_sampler=ByLength()), global_batch=12)
