"""`fully_shard` after `run.wrap`

The optimizer would train parameters that sharding has replaced. The error is raised before the
first step, or at the next optimizer step.

```python
model = run.wrap(network)              # trained with DDP
```

Refused: the wrapped model was sharded after run.wrap: 'module.0.weight' is a DTensor
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
run = elastic.join()
network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
model = run.wrap(network)
optimizer = torch.optim.AdamW(model.parameters())
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8), global_batch=24)
fully_shard(network)


def train() -> None:
    for _ in run.epochs(1):
        for inputs, targets in loader:
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()


run.retry(train)
