"""`fully_shard` inside of `run.wrap`

Sharded models are saved and loaded (docs/checkpoints.md), but not yet trained elastically.
Refused: run.wrap() of a sharded module

```python
model = run.wrap(network)
```
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
network = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
model = run.wrap(network)
