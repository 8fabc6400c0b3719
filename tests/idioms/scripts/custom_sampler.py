"""A sampler of one's own

Each epoch is drawn under seeds of the job: the same on every rank, in every world and after a
restart.

Group: Data
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))


class EasyFirst(Sampler):
    def __init__(self, difficulty):
        self.difficulty = difficulty
        self.epoch = 0

    def __iter__(self):
        noise = torch.randn(len(self.difficulty)) * (1 + self.epoch)
        self.epoch += 1
        return iter((self.difficulty + noise).argsort().tolist())

    def __len__(self):
        return len(self.difficulty)


run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
data = DataLoader(dataset, batch_size=4, sampler=EasyFirst(x.norm(dim=1)))
loader = run.loader(data, global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
