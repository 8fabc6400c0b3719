"""A prefetcher that fetches the next batch before the update

Requesting the next batch ends the current step, so the update would belong to the wrong step.

```python
loader = run.loader(DataLoader(dataset, num_workers=4, pin_memory=True))    # reads ahead
for inputs, targets in loader:
    inputs = inputs.to(run.device, non_blocking=True)
```

Refused: requests the next batch before it trains on the last one
"""

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
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


class DataPrefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = None
            self.next_target = None
            return

    def next(self):
        input = self.next_input
        target = self.next_target
        self.preload()
        return input, target


def train():
    for epoch in run.epochs(2):
        prefetcher = DataPrefetcher(loader)
        input, target = prefetcher.next()
        i = 0
        while input is not None:
            i += 1
            loss = F.mse_loss(model(input), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            input, target = prefetcher.next()


run.retry(train)
result = model.state_dict()
