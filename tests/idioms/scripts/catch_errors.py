"""Catching exceptions around the step

If the script catches an exception caused by a failed peer, the loop raises it again at the end of
the step, and the job recovers.

Group: The loop
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            try:
                optimizer.zero_grad()
                loss = F.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
            except Exception as error:  # noqa: BLE001
                print("skipping a batch:", error)
                continue


run.retry(train)
result = model.state_dict()
