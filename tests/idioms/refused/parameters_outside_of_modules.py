"""Parameters that are in no module of the job

The temperature of SAC, weights of several losses, an image that is optimised: as bare tensors they
are in no checkpoint, and a joining node begins with its own. As parameters of a wrapped module
their gradients are averaged, too.

```python
class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(1))

    def forward(self):
        return self.log_alpha.exp()

temperature = run.wrap(Temperature())
a_optimizer = torch.optim.Adam(temperature.parameters())
run.track(a_optimizer=a_optimizer)
```

Refused: updates parameters at step 0 that are in no wrapped or tracked module (1, of shape [1])
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
model = run.wrap(nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
log_alpha = torch.zeros(1, requires_grad=True)
a_optimizer = torch.optim.Adam([log_alpha], lr=1e-2)
run.track(optimizer=optimizer, a_optimizer=a_optimizer)
loader = run.loader(DataLoader(dataset, batch_size=24, shuffle=True), global_batch=24)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            a_optimizer.zero_grad()
            (log_alpha.exp() * loss + log_alpha.sum()).backward()
            a_optimizer.step()
            optimizer.step()


run.retry(train)
result = model.state_dict()
