"""A second loss in every n-th step, by the index of `enumerate(loader)`

As the generator of a GAN that is trained less often than its critic, a lazy regularization, or an
average of the weights that moves in every n-th step.

Group: Gradients
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
generator, critic = run.wrap(nn.Linear(2, 4)), run.wrap(nn.Linear(4, 1))
optimizer_g = torch.optim.RMSprop(generator.parameters(), lr=0.01)
optimizer_c = torch.optim.RMSprop(critic.parameters(), lr=0.01)
run.track(g=optimizer_g, c=optimizer_c)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)
n_critic = 3


def train():
    for epoch in run.epochs(2):
        for i, (real, _) in enumerate(loader):
            noise = real[:, :2]
            optimizer_c.zero_grad()
            (critic(generator(noise).detach()).mean() - critic(real).mean()).backward()
            optimizer_c.step()
            if i % n_critic == 0:
                optimizer_g.zero_grad()
                (-critic(generator(noise))).mean().backward()
                optimizer_g.step()


run.retry(train)
result = {**{f"generator.{n}": v for n, v in generator.state_dict().items()}, **critic.state_dict()}
