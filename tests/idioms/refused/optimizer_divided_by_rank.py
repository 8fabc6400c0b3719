"""An optimizer that partitions the parameters across ranks (Muon, ZeRO)

Each rank holds the momentum of its own parameters only. That momentum is lost when the rank dies.

```python
for p in params:                       # every rank updates all parameters
    update(p, self.state[p])
fully_shard(model)                     # or shard the model, which shards its optimizer, too
```

Refused: it is divided among the ranks
Workers: 3
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()


def zeropower(G):
    X = G / (G.norm() + 1e-7)
    T = X.size(0) > X.size(1)
    X = X.T if T else X
    for _ in range(5):
        A = X @ X.T
        B = -4.7750 * A + 2.0315 * A @ A
        X = 3.4445 * X + B @ X
    return X.T if T else X


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        params = sorted(params, key=lambda p: p.numel(), reverse=True)
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = group["params"]
            n, r = dist.get_world_size(), dist.get_rank()
            params_pad = params + [torch.empty_like(params[-1])] * (-len(params) % n)
            for base in range(0, len(params), n):
                if base + r < len(params):
                    p = params[base + r]
                    state = self.state[p]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    buf = state["momentum_buffer"]
                    buf.lerp_(p.grad, 1 - group["momentum"])
                    update = p.grad.lerp(buf, group["momentum"])
                    p.add_(zeropower(update), alpha=-group["lr"])
                for i in range(n):
                    if base + i < len(params):
                        dist.broadcast(params_pad[base + i], src=i)


net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
model = run.wrap(net)
matrices = [p for p in model.parameters() if p.ndim == 2]
rest = [p for p in model.parameters() if p.ndim != 2]
muon = Muon(matrices)
adam = torch.optim.AdamW(rest, lr=1e-3)
run.track(muon=muon, adam=adam)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            for o in (muon, adam):
                o.step()
            model.zero_grad(set_to_none=True)


run.retry(train)
result = model.state_dict()
