"""Tracking the optimizer of a sharded model

The optimizer state is sharded with the parameters. [Sharded models](how-to/sharded.md) shows the
loop that saves and restores both.

```python
state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
engine.save_async(state, step=step, world=world)
```

Refused: run.track(optimizer=…) of a sharded model's AdamW
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

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
run = elastic.join()
network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(fully_shard(network).parameters())
run.track(optimizer=optimizer)
