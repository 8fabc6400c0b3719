"""Parameters that are unused in some steps

`find_unused_parameters=True`, as in DistributedDataParallel.

Group: Models
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


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.experts = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])

    def forward(self, inputs, expert):
        return self.experts[expert](torch.tanh(self.embed(inputs)))


model = run.wrap(Experts(), find_unused_parameters=True)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs, i % 2), targets)
            loss.backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
