"""A custom sampler

The harness cannot reproduce its order in another world. Use one of the [supported
samplers](data.md#samplers), for example over a subset:

```python
part = torch.utils.data.Subset(dataset, indices)
loader = run.loader(DataLoader(part, batch_size=8, shuffle=True), global_batch=24)
```

Refused: cannot be reproduced in another world
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()


class Alternating(torch.utils.data.Sampler):
    def __iter__(self):
        return iter([*range(0, 96, 2), *range(1, 96, 2)])

    def __len__(self):
        return 96


loader = run.loader(DataLoader(dataset, batch_size=4, sampler=Alternating()), global_batch=12)
