"""An optimizer that is not a `torch.optim.Optimizer`

As in many courses: a class with `step`, `state_dict` and `load_state_dict`.

Group: Optimizers and learning rates
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


class Momentum:
    def __init__(self, params, lr, beta):
        self.params, self.lr, self.beta = list(params), lr, beta
        self.velocity = [torch.zeros_like(p) for p in self.params]

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p, v in zip(self.params, self.velocity):
            v.mul_(self.beta).add_(p.grad)
            p.sub_(v, alpha=self.lr)

    def state_dict(self):
        return {str(i): v for i, v in enumerate(self.velocity)}

    def load_state_dict(self, state):
        for i, v in enumerate(self.velocity):
            v.copy_(state[str(i)])


model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = Momentum(model.parameters(), lr=0.05, beta=0.9)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
