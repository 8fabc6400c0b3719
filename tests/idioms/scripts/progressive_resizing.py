"""Progressive resizing: a loader for each phase

Register the loaders of all phases first. `run.epochs` counts the epochs of the whole job, and
selects the phase.

Group: Data
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
images = torch.randn(72, 1, 16, 16)
labels = (images.mean((1, 2, 3)) > 0).long()


class Resized(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return len(images)

    def __getitem__(self, index):
        image = F.interpolate(images[index][None], self.size, mode="bilinear")[0]
        return image, labels[index]


run = elastic.join()
net = nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
    nn.Linear(16, 2),
)
model = run.wrap(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
phases = [
    {"ep": (0, 2), "sz": 8, "bs": 18, "lr": 0.05},
    {"ep": (2, 3), "sz": 12, "bs": 12, "lr": 0.02},
    {"ep": (3, 4), "sz": 16, "bs": 6, "lr": 0.01},
]
for phase in phases:
    loader = DataLoader(Resized(phase["sz"]), batch_size=phase["bs"], shuffle=True)
    phase["loader"] = run.loader(loader, global_batch=phase["bs"])
run.track(optimizer=optimizer)


def set_lr(lr):
    for group in optimizer.param_groups:
        group["lr"] = lr


def train():
    for epoch in run.epochs(phases[-1]["ep"][1]):
        phase = next(p for p in phases if p["ep"][0] <= epoch < p["ep"][1])
        set_lr(phase["lr"])
        for images, labels in phase["loader"]:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
