"""Active learning: samples are added in rounds

The samples of a loader must not change their number, so each round has a loader of its own, all
registered before training. The list of labelled samples is a tracked object, in which the datasets
look up their samples. Every rank scores the whole pool, so all ranks select the same samples.

Group: Data
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
y = x.sin().sum(1, keepdim=True)


class Pool:
    def __init__(self, labelled):
        self.labelled = labelled

    def state_dict(self):
        return {"labelled": list(self.labelled)}

    def load_state_dict(self, state):
        self.labelled = list(state["labelled"])


class Round(Dataset):
    def __init__(self, pool, size):
        self.pool, self.size = pool, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        sample = self.pool.labelled[index]
        return x[sample], y[sample]


rounds, first, more = 3, 24, 12
run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
pool = Pool(list(range(first)))
run.track(optimizer=optimizer, pool=pool)
loaders = [
    run.loader(
        DataLoader(Round(pool, first + r * more), batch_size=4, shuffle=True), global_batch=9
    )
    for r in range(rounds)
]


@torch.no_grad()
def query():
    model.eval()
    rest = sorted(set(range(len(x))) - set(pool.labelled))
    score = model(x[rest]).squeeze(1).abs()
    model.train()
    return [rest[i] for i in score.topk(more).indices.tolist()]


def train():
    for number in run.epochs(rounds):
        if len(pool.labelled) < len(loaders[number].dataset):
            pool.labelled = pool.labelled + query()
        for inputs, targets in loaders[number]:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


run.retry(train)
result = {**model.state_dict(), "labelled": torch.tensor(pool.labelled)}
