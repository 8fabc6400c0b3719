"""LBFGS

LBFGS changes its state before it has the gradients, so its steps cannot be repeated. To refine a
solution at the end, as for PINNs, train a copy once the job is done.

```python
optimizer = torch.optim.AdamW(model.parameters())
run.retry(train)
refined = copy.deepcopy(model.module)
lbfgs = torch.optim.LBFGS(refined.parameters())
```

Refused: LBFGS changes its state before gradients are known
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
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.LBFGS(model.parameters())
run.track(optimizer=optimizer)
