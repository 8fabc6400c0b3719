"""An iterator over the loader created before `run.retry`

As in many diffusion trainers: `self.dl = cycle(dl)` in `__init__`. After a change of the world, the
iterator would yield batches of the previous world or raise StopIteration.

```python
def train():
    batches = cycle(loader)
    while run.state["step"] < 24:
        inputs, targets = next(batches)
```

Refused: was created before run.retry called the function that reads it
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


def cycle(dl):
    while True:
        yield from dl


class Trainer:
    def __init__(self, model, dataset, train_num_steps):
        self.model = run.wrap(model)
        self.opt = torch.optim.Adam(model.parameters(), lr=0.01)
        run.track(optimizer=self.opt)
        dl = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
        self.dl = cycle(dl)
        self.train_num_steps = train_num_steps

    def train(self):
        run.state.setdefault("step", 0)
        while run.state["step"] < self.train_num_steps:
            inputs, targets = next(self.dl)
            loss = F.mse_loss(self.model(inputs), targets)
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            run.state["step"] += 1


trainer = Trainer(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), dataset, 24)
run.retry(trainer.train)
