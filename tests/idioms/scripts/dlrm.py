"""Sparse embeddings and dense layers with separate optimizers (DLRM)

Group: Models
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


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(n, 4, mode="sum", sparse=True) for n in (10, 30)
        )
        self.bottom = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.top = nn.Linear(4 + 3, 1)

    def forward(self, dense, sparse):
        z = [self.bottom(dense)] + [t(s) for t, s in zip(self.tables, sparse.unbind(1))]
        z = torch.stack(z, 1)
        inter = torch.bmm(z, z.transpose(1, 2))
        i, j = torch.tril_indices(3, 3, -1)
        return self.top(torch.cat([z[:, 0], inter[:, i, j]], 1))


sparse = torch.stack([torch.randint(0, 10, (96, 3)), torch.randint(0, 30, (96, 3))], 1)
dataset = TensorDataset(x, sparse, x.sin().sum(1, keepdim=True))
run = elastic.join()
model = run.wrap(DLRM())
sparse_optimizer = torch.optim.SparseAdam(model.module.tables.parameters(), lr=0.05)
dense_optimizer = torch.optim.Adagrad(
    [*model.module.bottom.parameters(), *model.module.top.parameters()], lr=0.05
)
run.track(sparse=sparse_optimizer, dense=dense_optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=10)


def train():
    for epoch in run.epochs(2):
        for dense, sparse, targets in loader:
            sparse_optimizer.zero_grad()
            dense_optimizer.zero_grad()
            F.mse_loss(model(dense, sparse), targets).backward()
            sparse_optimizer.step()
            dense_optimizer.step()


run.retry(train)
result = model.state_dict()
