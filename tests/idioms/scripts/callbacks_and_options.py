"""Callbacks, and options that are off

Callbacks are called by name. One that the training depends on is tracked; what others count is only
shown. Code of an option that is off may keep what it likes.

Group: The loop
"""

from types import SimpleNamespace

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


class Warmup:
    def __init__(self):
        self.count = 0

    def on_step_begin(self, trainer):
        for group in trainer.optimizer.param_groups:
            group.update(lr=0.01 * min(1.0, (self.count + 1) / 8))

    def on_step_end(self, trainer):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Printer:
    def __init__(self):
        self.losses = []

    def on_step_end(self, trainer):
        self.losses.append(trainer.loss.item())
        if len(self.losses) % 8 == 0:
            print(sum(self.losses) / len(self.losses))


class Trainer:
    def __init__(self, options):
        self.options, self.difficulty = options, 0.1
        self.model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.callbacks = [Warmup(), Printer()]
        run.track(optimizer=self.optimizer, warmup=self.callbacks[0])

    def fire(self, event):
        for callback in self.callbacks:
            if hasattr(callback, event):
                getattr(callback, event)(self)

    def fit(self):
        for epoch in run.epochs(2):
            self.model.train()
            for inputs, targets in loader:
                self.fire("on_step_begin")
                if self.options.curriculum:
                    inputs = inputs * self.difficulty
                    self.difficulty = min(1.0, self.difficulty + 0.1)
                self.optimizer.zero_grad()
                self.loss = F.mse_loss(self.model(inputs), targets)
                self.loss.backward()
                self.optimizer.step()
                self.fire("on_step_end")
            self.model.eval()


loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
trainer = Trainer(SimpleNamespace(curriculum=False))
run.retry(trainer.fit)
result = trainer.model.state_dict()
