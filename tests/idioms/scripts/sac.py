"""SAC with an automatic temperature, in the style of CleanRL

A step is one iteration of acting and updating, between `run.begin` and `run.commit`. The
temperature is a parameter of a wrapped module, because each rank computes another gradient of it.
Replay buffers belong to their ranks: a replacement begins with an empty one, and a repeated
iteration adds its transitions again, which the script accepts by `run.untracked`.

Group: The loop
Compared: among ranks only, because each rank plays its own episodes
Tolerance: 1, because a death loses the replay buffer of one rank
"""

import random
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

import elastic

random.seed(0)
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
args = SimpleNamespace(iterations=6, env_steps=8, batch_size=8, gamma=0.99, tau=0.1, lr=3e-3)
target_entropy = -2.0


class PointEnv:
    """A point that is rewarded for staying near the origin."""

    def reset(self):
        self.state = torch.randn(4)
        return self.state

    def step(self, action):
        self.state = 0.9 * self.state + 0.1 * torch.cat([action, action]) + 0.05 * torch.randn(4)
        return self.state, -self.state.pow(2).sum(), float(self.state.abs().max() > 2)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x):
        mean, log_std = self.body(x).chunk(2, dim=-1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        x_t = normal.rsample()
        action = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t) - torch.log(1 - action.pow(2) + 1e-6)
        return action, log_prob.sum(-1, keepdim=True)


class SoftQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x, a):
        return self.body(torch.cat([x, a], dim=-1))


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(1))

    def forward(self):
        return self.log_alpha.exp()


run = elastic.join()
critic, critic_target = SoftQ(), SoftQ()
critic_target.load_state_dict(critic.state_dict())
actor, qf, temperature = run.wrap(Actor()), run.wrap(critic), run.wrap(Temperature())
q_optimizer = torch.optim.Adam(qf.parameters(), lr=args.lr)
actor_optimizer = torch.optim.Adam(actor.parameters(), lr=args.lr)
a_optimizer = torch.optim.Adam(temperature.parameters(), lr=args.lr)
run.track(q=q_optimizer, actor=actor_optimizer, a=a_optimizer, critic_target=critic_target)
env, buffer = PointEnv(), []
run.untracked("buffer")


def play():
    obs = env.reset()
    for _ in range(args.env_steps):
        with torch.no_grad():
            action, _ = actor(obs)
        next_obs, reward, done = env.step(action)
        buffer.append((obs, action, reward.reshape(1), next_obs, torch.tensor([done])))
        obs = env.reset() if done else next_obs
    return [torch.stack(part) for part in zip(*random.sample(buffer, args.batch_size))]


def train():
    while True:
        step = run.begin()
        if step.number == args.iterations:
            return
        obs, actions, rewards, next_obs, dones = play()
        with torch.no_grad():
            next_actions, next_log_pi = actor(next_obs)
            alpha = temperature()
            next_q = critic_target(next_obs, next_actions) - alpha * next_log_pi
            next_q_value = rewards + (1 - dones) * args.gamma * next_q
        qf_loss = F.mse_loss(qf(obs, actions), next_q_value)
        q_optimizer.zero_grad()
        qf_loss.backward()
        q_optimizer.step()

        pi, log_pi = actor(obs)
        actor_loss = (alpha * log_pi - qf(obs, pi)).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()

        alpha_loss = (-temperature() * (log_pi.detach() + target_entropy)).mean()
        a_optimizer.zero_grad()
        alpha_loss.backward()
        a_optimizer.step()

        for param, target in zip(critic.parameters(), critic_target.parameters()):
            target.data.copy_(args.tau * param.data + (1 - args.tau) * target.data)
        run.commit()


run.retry(train)
result = actor.state_dict() | temperature.state_dict()
