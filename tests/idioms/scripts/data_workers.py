"""DataLoader workers

When the world changes, worker processes keep running until the end of the epoch.

Group: Data
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


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return len(x)

    def __getitem__(self, index):
        return x[index] + 0.1 * torch.randn(4), x[index].sin().sum(0, keepdim=True)


model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
data = DataLoader(Augmented(), batch_size=8, shuffle=True, num_workers=1, persistent_workers=True)
loader = run.loader(data, global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
