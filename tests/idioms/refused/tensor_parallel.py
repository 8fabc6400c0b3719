"""`parallelize_module` inside `run.wrap`

Tensor-parallel models also recover by restarting: see [sharded models](how-to/sharded.md). FSDP1's
`FullyShardedDataParallel`, and any other module with a DTensor, is refused in the same way.

```python
dist.init_process_group()                      # torchrun --rdzv-backend=etcd
parallelize_module(model, mesh, plan)
optimizer = torch.optim.AdamW(model.parameters())
state = {
    "model": get_model_state_dict(model),
    "optimizer": get_optimizer_state_dict(model, optimizer),
}
if found := checkpoints.latest(folder).checkpoint:
    checkpoints.load(folder, found.name, into=state, group=dist.group.WORLD)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
```

Refused: run.wrap() of a sharded module: '0.weight' is a DTensor
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
run = elastic.join()
network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
mesh = init_device_mesh("cpu", (1,))
model = run.wrap(parallelize_module(network, mesh, {"0": ColwiseParallel()}))
