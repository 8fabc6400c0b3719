"""Gradient surgery between tasks (PCGrad)

Only `loss.backward()` averages gradients over the ranks, once per forward pass of the wrapped
model. So each task has its own forward and backward pass, and the script combines the averaged
gradients. Gradients from `torch.autograd.grad` are those of one rank.

Group: Gradients
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


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x, task):
        return getattr(self, task)(self.body(x).tanh())


run = elastic.join()
model = run.wrap(MultiTask(), find_unused_parameters=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def flat_gradient():
    return torch.cat(
        [
            torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten().clone()
            for p in model.parameters()
        ]
    )


def project(grad, other):
    product = grad @ other
    return grad - product / other.norm() ** 2 * other if product < 0 else grad


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            grads = []
            for task, wanted in (("a", targets), ("b", -targets)):
                optimizer.zero_grad()
                F.mse_loss(model(inputs, task), wanted).backward()
                grads.append(flat_gradient())
            combined = project(grads[0], grads[1]) + project(grads[1], grads[0])
            parts = combined.split([p.numel() for p in model.parameters()])
            for p, part in zip(model.parameters(), parts):
                p.grad = part.view_as(p).clone()
            optimizer.step()


run.retry(train)
result = model.state_dict()
