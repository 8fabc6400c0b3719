"""An untracked average in a class of the script's own

A joining node would restart the average, and a repeated step would apply it twice. The same applies
to a dict or a list of tensors, and to a copy of the model (a teacher, a target network). The check
finds averages that the training function can reach: global variables, variables of the enclosing
function, arguments, and attributes of a trainer.

```python
class EMA:
    ...
    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]


run.track(optimizer=optimizer, ema=ema)
```

Refused: ema.shadow averages the weights, but is not tracked
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))


class EMA:
    def __init__(self, model, decay=0.999):
        self.model = model
        self.decay = decay
        self.shadow = {}
        self.backup = {}

    def register(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.shadow[name] = param.data.clone()

    def update(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                average = (1.0 - self.decay) * param.data + self.decay * self.shadow[name]
                self.shadow[name] = average.clone()


def main():
    run = elastic.join()
    model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.track(optimizer=optimizer)
    loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
    ema = EMA(model)
    ema.register()

    def train():
        for epoch in run.epochs(4):
            for inputs, targets in loader:
                optimizer.zero_grad()
                F.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                ema.update()

    run.retry(train)


if __name__ == "__main__":
    main()
