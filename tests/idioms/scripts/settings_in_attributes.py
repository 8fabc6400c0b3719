"""Settings of a module and of a dataset

A temperature decays in `forward`, and from an epoch on augmentation is off, as in YOLOX: plain
attributes of modules and of the dataset are part of the job's state.

Group: Models
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(36, 4)
y = x.sin().sum(1, keepdim=True)


class Mixed(Dataset):
    def __init__(self):
        self.mosaic = True

    def __len__(self):
        return len(x)

    def __getitem__(self, index):
        inputs = x[index]
        if self.mosaic:
            inputs = inputs + 0.3 * x[index - 1]
        return inputs, y[index]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)
        self.temperature = 2.0
        self.is_gated = False

    def forward(self, inputs):
        if self.training:
            self.temperature = max(0.5, self.temperature * 0.97)
        hidden = self.body(inputs)
        if self.is_gated:
            hidden = hidden * hidden.sigmoid()
        return self.head((hidden / self.temperature).softmax(-1))


run = elastic.join()
network = Network()
model = run.wrap(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.track(optimizer=optimizer)
dataset = Mixed()
loader = run.loader(DataLoader(dataset, batch_size=4, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(6):
        if epoch == 1:
            dataset.mosaic = False
            network.is_gated = True
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
