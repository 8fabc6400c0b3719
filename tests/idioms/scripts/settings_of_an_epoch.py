"""Settings that change at an epoch

As in YOLOX, which ends its augmentation some epochs before the end: plain attributes of modules and
of the dataset are part of the job's state.

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


run = elastic.join()
network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 1))
network(x)  # some statistics
network[2].eval()
network[1].scale = 1.0
network[1].register_forward_hook(lambda module, inputs, output: output * module.scale)
model = run.wrap(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run.track(optimizer=optimizer)
dataset = Mixed()
loader = run.loader(DataLoader(dataset, batch_size=4, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(6):
        if epoch == 1:
            dataset.mosaic = False
            network[1].scale = 0.7
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
