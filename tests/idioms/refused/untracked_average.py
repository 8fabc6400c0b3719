"""An untracked average of the weights

A joining node would restart its average, and would save it if it became rank 0. The check
recognises `AveragedModel`, and modules that contain a copy of the model and whose class name
indicates an average (`ModelEmaV2`, `EMA`, `ExponentialMovingAverage`).

```python
ema = AveragedModel(model)
run.track(optimizer=optimizer, ema=ema)
```

Refused: ModelEmaV2 averages the weights that optimizer updates, but is not tracked
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))


class ModelEmaV2(nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = copy.deepcopy(model)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for name, e in self.module.state_dict().items():
            e.copy_(self.decay * e + (1.0 - self.decay) * model.state_dict()[name])


run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
model_ema = ModelEmaV2(model.module)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(4):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            model_ema.update(model.module)


run.retry(train)
