"""PyTorch's VAE example

The original loss is a sum over the batch. Losses are averaged over ranks by sample count, so use a
mean: `loss / len(data)`. With a sum, gradients depend on the number of workers, as in plain
DistributedDataParallel.

Compared: among ranks only, because each rank draws its own noise
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


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.mu, self.logvar, self.dec = (
            nn.Linear(4, 8),
            nn.Linear(8, 2),
            nn.Linear(8, 2),
            nn.Linear(2, 4),
        )

    def forward(self, x):
        h = self.enc(x).relu()
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar


run = elastic.join()
model = run.wrap(VAE())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def loss_function(recon, x, mu, logvar):
    return F.mse_loss(recon, x, reduction="sum") - 0.5 * torch.sum(
        1 + logvar - mu.pow(2) - logvar.exp()
    )


def train():
    for epoch in run.epochs(2):
        model.train()
        for data, _ in loader:
            optimizer.zero_grad()
            recon, mu, logvar = model(data)
            loss = loss_function(recon, data, mu, logvar) / len(data)
            loss.backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
