"""A custom sampler

Only the order of samplers that are functions of an index list can be reproduced in another world.
Refused: cannot be reproduced in another world

```python
part = torch.utils.data.Subset(dataset, indices)
loader = run.loader(DataLoader(part, batch_size=8, shuffle=True), global_batch=24)
```
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
