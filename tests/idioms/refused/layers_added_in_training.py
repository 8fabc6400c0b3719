"""Adding layers or parameters during training

Their gradients would not be averaged, so ranks would train different models, and a joining node
could not load the state. The same applies to a parameter that is replaced (`self.weight =
nn.Parameter(…)` in the forward pass), and to pruning that begins during training
([pruning](../tests/idioms/scripts/lottery_ticket.py)).

```python
for block in network.blocks[1:]:       # all of them, before run.wrap
    block.requires_grad_(False)        # until it is used
model = run.wrap(network)
```

Refused: got the new entry 'blocks.0.weight' after training began
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(4, 8), nn.ModuleList(), nn.Linear(8, 1)

    def forward(self, x):
        x = self.first(x).tanh()
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x)


run = elastic.join()
model = run.wrap(Growing())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=24)


def train():
    for epoch in run.epochs(4):
        if epoch == 2:
            block = nn.Linear(8, 8)
            model.module.blocks.append(block)
            optimizer.add_param_group({"params": block.parameters()})
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
