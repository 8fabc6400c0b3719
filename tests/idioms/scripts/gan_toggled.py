"""A GAN that toggles `requires_grad` of the discriminator

As in CycleGAN's `set_requires_grad`: the discriminator receives no gradients in the generator's
step.

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

run = elastic.join()


class WithNoise(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return x[index], torch.randn(3)


D = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))
G = run.wrap(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)))
opt_d = torch.optim.SGD(D.parameters(), lr=0.05)
opt_g = torch.optim.SGD(G.parameters(), lr=0.05)
run.track(opt_d=opt_d, opt_g=opt_g)
loader = run.loader(DataLoader(WithNoise(), batch_size=8, shuffle=True), global_batch=12)


def set_requires_grad(net, requires_grad):
    for param in net.parameters():
        param.requires_grad = requires_grad


def train():
    for epoch in run.epochs(2):
        for real, noise in loader:
            fake = G(noise)
            set_requires_grad(D, False)
            opt_g.zero_grad()
            F.softplus(-D(fake)).mean().backward()
            opt_g.step()

            set_requires_grad(D, True)
            opt_d.zero_grad()
            loss = F.softplus(-D(real)).mean() + F.softplus(D(fake.detach())).mean()
            loss.backward()
            opt_d.step()


run.retry(train)
result = {f"D.{k}": v for k, v in D.state_dict().items()}
result |= {f"G.{k}": v for k, v in G.state_dict().items()}
