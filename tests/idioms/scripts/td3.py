"""TD3+BC: an actor's loss through its critic, and delayed updates of the actor

The actor's loss reaches only some parameters of the critic, through a method of its own: their
gradients are not used, and cleared by `zero_grad()` before the critic's next loss. The count of
updates is in `run.state`.

Group: Models
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
states, actions = torch.randn(72, 5), torch.rand(72, 2) * 2 - 1
next_states, rewards = states + 0.1 * torch.randn(72, 5), -states.pow(2).sum(1, keepdim=True)


class Transitions(Dataset):
    def __len__(self):
        return 72

    def __getitem__(self, i):
        return states[i], actions[i], next_states[i], rewards[i], torch.randn(2)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.l2 = nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, state):
        return self.l2(self.l1(state).relu()).tanh()


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.q1 = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 1))
        self.q2 = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, state, action):
        both = torch.cat([state, action], 1)
        return self.q1(both), self.q2(both)

    def Q1(self, state, action):
        return self.q1(torch.cat([state, action], 1))


run = elastic.join()
actor, critic = Actor(), Critic()
actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
actor, critic = run.wrap(actor), run.wrap(critic)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=3e-3)
run.track(actor_optimizer=actor_optimizer, critic_optimizer=critic_optimizer)
run.track(actor_target=actor_target, critic_target=critic_target)
loader = run.loader(DataLoader(Transitions(), batch_size=12, shuffle=True), global_batch=12)


def update_target(module, target, tau=0.05):
    for param, target_param in zip(module.parameters(), target.parameters()):
        target_param.data.copy_(tau * param.data + (1 - tau) * target_param.data)


def update(state, action, next_state, reward, noise):
    run.state["total_it"] += 1
    with torch.no_grad():
        next_action = (actor_target(next_state) + (0.2 * noise).clamp(-0.5, 0.5)).clamp(-1, 1)
        target = reward + 0.99 * torch.min(*critic_target(next_state, next_action))
    current_1, current_2 = critic(state, action)
    critic_loss = F.mse_loss(current_1, target) + F.mse_loss(current_2, target)
    critic_optimizer.zero_grad()
    critic_loss.backward()
    critic_optimizer.step()
    if run.state["total_it"] % 2 == 0:
        pi = actor(state)
        actor_loss = -critic.module.Q1(state, pi).mean() + F.mse_loss(pi, action)
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        update_target(critic, critic_target)
        update_target(actor, actor_target)


def train():
    run.state.setdefault("total_it", 0)
    for epoch in run.epochs(3):
        for batch in loader:
            update(*batch)


run.retry(train)
models = {"actor": actor, "critic": critic, "critic_target": critic_target}
result = {f"{m}.{n}": v for m, one in models.items() for n, v in one.state_dict().items()}
