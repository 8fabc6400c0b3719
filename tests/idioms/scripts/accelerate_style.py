"""An Accelerate-style loop

`accumulate(model)` counts batches. Create the accelerator inside the function passed to
`run.retry`, so that its count restarts together with the repeated batches.

Group: The loop
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))


class Accelerator:
    def __init__(self, gradient_accumulation_steps):
        self.n, self.step, self.sync_gradients = gradient_accumulation_steps, 0, True

    def prepare(self, optimizer):
        return AcceleratedOptimizer(optimizer, self)

    @contextlib.contextmanager
    def accumulate(self, model):
        self.step += 1
        self.sync_gradients = self.step % self.n == 0
        with contextlib.nullcontext() if self.sync_gradients else model.no_sync():
            yield

    def backward(self, loss):
        (loss / self.n).backward()


class AcceleratedOptimizer:
    def __init__(self, optimizer, accelerator):
        self.optimizer, self.accelerator = optimizer, accelerator

    def step(self):
        if self.accelerator.sync_gradients:
            self.optimizer.step()

    def zero_grad(self):
        if self.accelerator.sync_gradients:
            self.optimizer.zero_grad()


run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    accelerator = Accelerator(4)
    prepared = accelerator.prepare(optimizer)
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                prepared.step()
                prepared.zero_grad()


run.retry(train)
result = model.state_dict()
