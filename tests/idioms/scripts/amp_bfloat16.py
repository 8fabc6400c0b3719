"""Mixed precision with `torch.autocast`

Tolerance: 0.02, because bfloat16 has three digits and shares are summed in a different order
Group: Precision and compilation
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
x = torch.randn(96, 4)
dataset = TensorDataset(x, (x.sum(1) > 0).long())

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).to(run.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            inputs, targets = inputs.to(run.device), targets.to(run.device)
            with torch.autocast(run.device.type, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
