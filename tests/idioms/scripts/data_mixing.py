"""A mixture of data sets with weights

One loader over all data sets, with a weight for each sample. Do not draw the next loader at random
in the loop: a generator of the script is not part of the job's state, and the default generators
differ between ranks.

Group: Data
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset, WeightedRandomSampler

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
web = TensorDataset(x[:64], x[:64].sin().sum(1, keepdim=True))
code = TensorDataset(x[64:], x[64:].cos().sum(1, keepdim=True))
proportions = [(web, 0.7), (code, 0.3)]
weights = [share / len(part) for part, share in proportions for _ in range(len(part))]

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
mixture = ConcatDataset([part for part, _ in proportions])
sampler = WeightedRandomSampler(weights, num_samples=96)
loader = run.loader(DataLoader(mixture, batch_size=8, sampler=sampler), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
