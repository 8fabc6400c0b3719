"""Several heads, one loss"""

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


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.regression = nn.Linear(8, 1)
        self.classification = nn.Linear(8, 2)

    def forward(self, inputs):
        hidden = self.body(inputs)
        return {"value": self.regression(hidden), "class": self.classification(hidden)}


model = run.wrap(MultiTask())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            output = model(inputs)
            loss = F.mse_loss(output["value"], targets)
            loss = loss + 0.5 * F.cross_entropy(output["class"], (targets[:, 0] > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
