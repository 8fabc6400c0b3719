"""A GAN: two models, two optimizers, one loader

As in the DCGAN example. The noise is part of the dataset: random numbers drawn by a dataset depend
on the sample and the epoch, not on the world.

Group: Models
"""

import torch
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


netD = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))
netG = run.wrap(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)))
optimizerD = torch.optim.Adam(netD.parameters(), lr=0.01, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=0.01, betas=(0.5, 0.999))
run.track(optimizerD=optimizerD, optimizerG=optimizerG)
loader = run.loader(DataLoader(WithNoise(), batch_size=8, shuffle=True), global_batch=12)
criterion = nn.BCEWithLogitsLoss()


def train():
    for epoch in run.epochs(2):
        for real, noise in loader:
            netD.zero_grad()
            errD_real = criterion(netD(real), torch.ones(len(real), 1))
            errD_real.backward()
            fake = netG(noise)
            errD_fake = criterion(netD(fake.detach()), torch.zeros(len(real), 1))
            errD_fake.backward()
            optimizerD.step()

            netG.zero_grad()
            errG = criterion(netD(fake), torch.ones(len(real), 1))
            errG.backward()
            optimizerG.step()


run.retry(train)
result = {f"D.{k}": v for k, v in netD.state_dict().items()}
result |= {f"G.{k}": v for k, v in netG.state_dict().items()}
