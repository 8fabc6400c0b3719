"""A plain `DataLoader` beside the job's loader

After a death it would begin again, while the job's loader resumes. Loaders of the job advance
together. A plain one may be read within a step, as in an evaluation.

```python
other = run.loader(DataLoader(unlabelled, batch_size=8, shuffle=True))
for (inputs, targets), (more,) in zip(loader, other):
```

Refused: a DataLoader that is not part of the job is read in step 0 and in step 1
"""

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
unlabelled = TensorDataset(torch.randn(60, 4))
other = DataLoader(unlabelled, batch_size=8, shuffle=True)


def train():
    for epoch in run.epochs(2):
        for (inputs, targets), (more,) in zip(loader, itertools.cycle(other)):
            optimizer.zero_grad()
            supervised = F.mse_loss(model(inputs), targets)
            consistency = model(more).pow(2).mean()
            (supervised + 0.1 * consistency).backward()
            optimizer.step()


run.retry(train)
