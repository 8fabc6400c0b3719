"""Several discriminator steps per generator step (WGAN)

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


critic = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)))
generator = run.wrap(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)))
critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=0.01)
generator_optimizer = torch.optim.RMSprop(generator.parameters(), lr=0.01)
run.track(critic=critic_optimizer, generator=generator_optimizer)
loader = run.loader(DataLoader(WithNoise(), batch_size=8, shuffle=True), global_batch=12)


def train():
    for epoch in run.epochs(2):
        for i, (real, noise) in enumerate(loader, start=loader.index):
            critic_optimizer.zero_grad()
            fake = generator(noise).detach()
            loss = critic(fake).mean() - critic(real).mean()
            loss.backward()
            critic_optimizer.step()
            for p in critic.parameters():
                p.data.clamp_(-0.1, 0.1)
            if (i + 1) % 3 == 0:
                generator_optimizer.zero_grad()
                (-critic(generator(noise)).mean()).backward()
                generator_optimizer.step()


run.retry(train)
result = {f"D.{k}": v for k, v in critic.state_dict().items()}
result |= {f"G.{k}": v for k, v in generator.state_dict().items()}
