"""Sharpness-aware minimisation as a wrapper around an optimizer

The common `SAM(params, base_optimizer, …)` class. Pass its `base_optimizer` to `run.track`, or the
wrapper, if the script calls `step(closure)` of the wrapper.

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


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grads = [p.grad.norm() for g in self.param_groups for p in g["params"]]
        scale = self.param_groups[0]["rho"] / (torch.stack(grads).norm() + 1e-12)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
run.track(optimizer=optimizer.base_optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            F.mse_loss(model(inputs), targets).backward()
            optimizer.first_step(zero_grad=True)
            F.mse_loss(model(inputs), targets).backward()
            optimizer.second_step(zero_grad=True)


run.retry(train)
result = model.state_dict()
