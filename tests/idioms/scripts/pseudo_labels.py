"""Self-training: pseudo-labels that are assigned again between epochs

The labels are state of the dataset, which is tracked. `run.state` records the epoch of the last
assignment, so a resumed epoch does not repeat it. The loss is a mean over the labelled samples of
all ranks.

Group: Data
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(72, 4)
y = (x.sin().sum(1) > 0).long()


class SemiSupervised(Dataset):
    def __init__(self):
        self.targets = torch.full((72,), -1)
        self.targets[:36] = y[:36]

    def __len__(self):
        return 72

    def __getitem__(self, i):
        return x[i], self.targets[i]

    def state_dict(self):
        return {"targets": self.targets}

    def load_state_dict(self, state):
        self.targets = state["targets"]


run = elastic.join()
dataset = SemiSupervised()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
run.track(optimizer=optimizer, dataset=dataset)
loader = run.loader(DataLoader(dataset, batch_size=6, shuffle=True), global_batch=12)


@torch.no_grad()
def assign():
    model.eval()
    confidence, label = model(x[36:]).softmax(1).max(1)
    dataset.targets[36:] = torch.where(confidence > 0.6, label, -1)
    model.train()


def train():
    run.state.setdefault("assigned", 0)
    for epoch in run.epochs(4):
        if epoch > run.state["assigned"]:
            assign()
            run.state["assigned"] = epoch
        for step in run.steps(loader):
            for inputs, targets in step:
                labelled = (targets >= 0).sum().double()
                dist.all_reduce(labelled)
                loss = F.cross_entropy(model(inputs), targets, ignore_index=-1, reduction="sum")
                optimizer.zero_grad()
                (loss / labelled.clamp(min=1) / step.share).backward()
                optimizer.step()


run.retry(train)
result = {**model.state_dict(), "targets": dataset.targets}
