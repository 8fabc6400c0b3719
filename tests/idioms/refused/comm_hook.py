"""DDP communication hooks

A hook would bypass the weighting of uneven shares.

```python
model = run.wrap(network)              # the harness reduces gradients itself
```

Refused: gradients would bypass the weights of uneven shares
"""

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
model.register_comm_hook(None, fp16_compress_hook)
