"""PyTorch's DCGAN example

Two wrapped models with BatchNorm, two optimizers, and noise drawn in the loop.

Compared: among ranks only, because each rank draws its own noise
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


def weights_init(m):
    if isinstance(m, nn.Linear):
        nn.init.normal_(m.weight, 0.0, 0.2)


G = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
D = nn.Sequential(
    nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid()
)
G.apply(weights_init)
D.apply(weights_init)
netG, netD = run.wrap(G, broadcast_buffers=False), run.wrap(D, broadcast_buffers=False)
optimizerD = torch.optim.Adam(netD.parameters(), lr=0.002, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=0.002, betas=(0.5, 0.999))
run.track(optimizerD=optimizerD, optimizerG=optimizerG)
dataloader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
criterion = nn.BCELoss()
fixed_noise = torch.randn(6, 3)
real_label, fake_label = 1.0, 0.0


def train():
    for epoch in run.epochs(2):
        for i, data in enumerate(dataloader, dataloader.index):
            netD.zero_grad()
            real = data[0]
            label = torch.full((len(real),), real_label)
            output = netD(real).view(-1)
            errD_real = criterion(output, label)
            errD_real.backward()
            noise = torch.randn(len(real), 3)
            fake = netG(noise)
            label.fill_(fake_label)
            output = netD(fake.detach()).view(-1)
            errD_fake = criterion(output, label)
            errD_fake.backward()
            optimizerD.step()
            netG.zero_grad()
            label.fill_(real_label)
            output = netD(fake).view(-1)
            errG = criterion(output, label)
            errG.backward()
            optimizerG.step()
            if i % 4 == 0 and run.is_main:
                with torch.no_grad():
                    print(netG(fixed_noise).mean())


run.retry(train)


def is_trained(name):
    return not name.endswith(("running_mean", "running_var", "num_batches_tracked"))


result = {f"g.{k}": v for k, v in netG.state_dict().items() if is_trained(k)} | {
    f"d.{k}": v for k, v in netD.state_dict().items() if is_trained(k)
}
