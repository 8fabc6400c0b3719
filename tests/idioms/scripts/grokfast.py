"""Gradients amplified by their moving average (Grokfast)

The average is a tracked object. In a variable of the training function it would begin again after
a death.

Group: Gradients
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(48, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))


class GradientFilter:
    def __init__(self, alpha=0.9, factor=2.0):
        self.alpha, self.factor, self.averages = alpha, factor, None

    def __call__(self, model):
        if self.averages is None:
            self.averages = {name: p.grad.clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            self.averages[name] = self.averages[name] * self.alpha + p.grad * (1 - self.alpha)
            p.grad = p.grad + self.averages[name] * self.factor

    def state_dict(self):
        return {"averages": self.averages}

    def load_state_dict(self, state):
        self.averages = state["averages"]


run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
filter_gradients = GradientFilter()
run.track(optimizer=optimizer, filter_gradients=filter_gradients)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            filter_gradients(model)
            optimizer.step()


run.retry(train)
averages = {f"average.{name}": value for name, value in filter_gradients.averages.items()}
result = {**model.state_dict(), **averages}
