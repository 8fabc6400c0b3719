"""VQ-VAE: a codebook of exponential moving averages

The codebook consists of buffers, which change in place and in the forward pass. Counts and sums are
those of the global batch. Dead codes are replaced by vectors of rank 0.

Compared: among ranks only, because dead codes are replaced by random vectors
Group: Models
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))


class Quantize(nn.Module):
    def __init__(self, dim, n_embed, decay=0.9, eps=1e-5):
        super().__init__()
        self.n_embed, self.decay, self.eps = n_embed, decay, eps
        embed = torch.randn(dim, n_embed)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.ones(n_embed))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, z):
        distance = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.embed + self.embed.pow(2).sum(0)
        index = distance.argmin(1)
        quantize = F.embedding(index, self.embed.T)
        if self.training:
            self.update(z.detach(), F.one_hot(index, self.n_embed).to(z.dtype))
        diff = (quantize.detach() - z).pow(2).mean()
        return z + (quantize - z).detach(), diff

    @torch.no_grad()
    def update(self, z, onehot):
        counts, sums = onehot.sum(0), z.T @ onehot
        if dist.is_initialized():
            dist.all_reduce(counts)
            dist.all_reduce(sums)
        self.cluster_size.data.mul_(self.decay).add_(counts, alpha=1 - self.decay)
        self.embed_avg.data.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        n = self.cluster_size.sum()
        size = (self.cluster_size + self.eps) / (n + self.n_embed * self.eps) * n
        self.embed.data.copy_(self.embed_avg / size)
        dead = self.cluster_size < 0.8
        if dead.any():
            picked = z[torch.randint(0, len(z), (int(dead.sum()),))]
            if dist.is_initialized():
                dist.broadcast(picked, 0)
            self.embed.data[:, dead] = self.embed_avg.data[:, dead] = picked.T
            self.cluster_size.data[dead] = 1.0


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.quantize, self.dec = nn.Linear(4, 4), Quantize(4, 6), nn.Linear(4, 4)

    def forward(self, input):
        quant, diff = self.quantize(self.enc(input))
        return self.dec(quant), diff


run = elastic.join()
model = run.wrap(VQVAE())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for img, _ in loader:
            model.zero_grad()
            out, latent_loss = model(img)
            loss = F.mse_loss(out, img) + 0.25 * latent_loss
            loss.backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
