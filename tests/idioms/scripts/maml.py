"""MAML: an inner loop of functional updates

The inner loop is in the forward method of the wrapped module. Tasks are samples: their random
numbers depend on the sample and the epoch.

Group: Models
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)


class Sines(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        amplitude, phase = torch.rand(1) * 4 + 0.1, torch.rand(1) * 3.14
        x = torch.rand(10, 1) * 10 - 5
        y = amplitude * torch.sin(x + phase)
        return x[:5], y[:5], x[5:], y[5:]


class MAML(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        self.inner_lr = nn.Parameter(torch.tensor(0.02))

    def forward(self, *tasks):
        losses = []
        for x, y, query_x, query_y in zip(*tasks):
            params = dict(self.net.named_parameters())
            for _ in range(2):
                loss = F.mse_loss(functional_call(self.net, params, x), y)
                grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
                params = {n: p - self.inner_lr * g for (n, p), g in zip(params.items(), grads)}
            losses.append(F.mse_loss(functional_call(self.net, params, query_x), query_y))
        return torch.stack(losses)


run = elastic.join()
model = run.wrap(MAML())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(Sines(), batch_size=4, shuffle=True), global_batch=8)


def train():
    for epoch in run.epochs(2):
        for tasks in loader:
            optimizer.zero_grad()
            model(*tasks).mean().backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
