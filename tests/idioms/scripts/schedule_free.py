"""A schedule-free optimizer that swaps weights for evaluation

`optimizer.eval()` and `optimizer.train()` change the weights in place between epochs.

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


class SGDScheduleFree(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum, k=0, train_mode=False))

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            if group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=1 - 1 / group["momentum"])
                group["train_mode"] = False

    @torch.no_grad()
    def train(self):
        for group in self.param_groups:
            if not group["train_mode"]:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"], weight=1 - group["momentum"])
                group["train_mode"] = True

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if not group["train_mode"]:
                raise Exception("Not in train mode!")
            ckp1 = 1 / (group["k"] + 1)
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "z" not in self.state[p]:
                    self.state[p]["z"] = p.clone()
                z = self.state[p]["z"]
                p.lerp_(end=z, weight=ckp1)
                p.add_(p.grad, alpha=group["lr"] * (group["momentum"] * (1 - ckp1) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = SGDScheduleFree(model.parameters())
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def evaluate():
    model.eval()
    optimizer.eval()
    with torch.no_grad():
        return F.mse_loss(model(x), dataset.tensors[1]).item()


def train():
    for epoch in run.epochs(2):
        model.train()
        optimizer.train()
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        evaluate()


run.retry(train)
result = model.state_dict()
