"""Cross-validation: several trainings in one job

Models, optimizers and loaders of all folds are registered first. One function trains all folds, in
one call of `run.retry`, and `run.epochs` counts the epochs of the whole job. With one `run.retry`
per fold, a joining node would call `run.mean` of a fold that the others have completed.

Group: The loop
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
folds = torch.randperm(96, generator=torch.Generator().manual_seed(0)).chunk(3)
epochs = 2


class Fold:
    def __init__(self, number):
        rest = torch.cat([fold for i, fold in enumerate(folds) if i != number])
        train_set, val_set = Subset(dataset, rest.tolist()), Subset(dataset, folds[number].tolist())
        self.model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.loader = run.loader(DataLoader(train_set, batch_size=8, shuffle=True), global_batch=24)
        self.val_loader = run.shard(DataLoader(val_set, batch_size=8))
        run.track(**{f"optimizer{number}": self.optimizer})

    def fit(self, until):
        for epoch in run.epochs(until):
            self.model.train()
            for inputs, targets in self.loader:
                self.optimizer.zero_grad()
                F.mse_loss(self.model(inputs), targets).backward()
                self.optimizer.step()

    @torch.no_grad()
    def score(self):
        self.model.eval()
        error, seen = 0.0, 0
        for inputs, targets in self.val_loader:
            error += F.mse_loss(self.model(inputs), targets, reduction="sum").item()
            seen += len(inputs)
        return run.mean(seen, error=error / max(seen, 1))["error"]


run = elastic.join()
trainings = [Fold(number) for number in range(len(folds))]


def main():
    scores = []
    for number, fold in enumerate(trainings):
        fold.fit(until=(number + 1) * epochs)
        scores.append(fold.score())
    return scores


scores = run.retry(main)
result = {f"{i}.{n}": v for i, f in enumerate(trainings) for n, v in f.model.state_dict().items()}
result["scores"] = torch.tensor(scores)
