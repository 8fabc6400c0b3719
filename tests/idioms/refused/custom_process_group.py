"""A user-defined process group for DDP

A recovery rebuilds only the process group of the world, so DDP must use that one.

```python
model = run.wrap(network)
```

Refused: the world's group is the only one that is rebuilt
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
model = run.wrap(nn.Linear(4, 1), process_group=None)
