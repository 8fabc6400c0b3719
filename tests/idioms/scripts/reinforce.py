"""REINFORCE with a running reward

Each sample is an episode: the dataset item is a seed, and all randomness in the episode comes from
generators with that seed. Episodes are therefore identical for any world size, and each one is used
exactly once.

Inexact: running to 0.1, because a repeated step may play with the updated weights
Group: The loop
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))


class Env:
    """A walk on a line: reach +2."""

    def reset(self, seed):
        self.rng = torch.Generator().manual_seed(seed)
        self.s = torch.randn(4, generator=self.rng)
        return self.s

    def step(self, a):
        self.s = self.s + (0.1 if a else -0.1) + 0.05 * torch.randn(4, generator=self.rng)
        return self.s, float(self.s.sum()), bool(self.s.abs().max() > 2)


env = Env()
run = elastic.join()
policy = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
model = policy
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
run.track(optimizer=optimizer)
episodes = run.loader(DataLoader(torch.arange(48), batch_size=1), global_batch=3)


def play(seed):
    state, log_probs, rewards = env.reset(seed), [], []
    draw = torch.Generator().manual_seed(seed)
    for t in range(6):
        probs = policy(state[None]).softmax(1)[0]
        action = torch.multinomial(probs, 1, generator=draw).item()
        log_probs.append(probs[action].log())
        state, reward, done = env.step(action)
        rewards.append(reward)
        if done:
            break
    R, returns = 0.0, []
    for r in rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    return -(torch.stack(log_probs) * torch.tensor(returns)).sum(), sum(rewards)


def train():
    run.state.setdefault("running_reward", 10.0)
    for _ in run.epochs(1):
        for seeds in episodes:
            losses, rewards = zip(*[play(int(s)) for s in seeds])
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
            reward = run.mean(len(seeds), r=sum(rewards) / len(rewards))["r"]
            run.state["running_reward"] = 0.05 * reward + 0.95 * run.state["running_reward"]


run.retry(train)
result = {**model.state_dict(), "running": torch.tensor(run.state["running_reward"])}
