"""A gradient penalty (WGAN-GP, R1)

`torch.autograd.grad(create_graph=True)` with respect to the inputs, computed on the unwrapped
module instead of through DDP.

Group: Gradients
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs):
        inputs = inputs.requires_grad_()
        scores = self.net(inputs)
        (slope,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
        return scores, slope


model = run.wrap(Critic())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    model.train()
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            scores, slope = model(inputs)
            penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
            loss = -(scores * targets).mean() + 0.5 * penalty
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
