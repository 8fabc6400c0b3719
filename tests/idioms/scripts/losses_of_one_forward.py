"""Several losses of one forward pass, each with its own backward pass

Gradients are averaged over the ranks in each pass. (DistributedDataParallel averages those of the
first one only.)

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

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            outputs = model(inputs)
            F.mse_loss(outputs, targets).backward(retain_graph=True)
            if loader.index % 3:
                outputs.abs().mean().backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
