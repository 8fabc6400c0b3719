"""PPO in the style of CleanRL

A step is one iteration: `run.begin` before the rollout, and `run.commit` after all epochs and
mini-batches of its update. An interrupted iteration is repeated with a new rollout, so environments
are reset for each one. The learning rate is computed from `step.number`.

Group: The loop
Compared: among ranks only, because each rank plays its own episodes
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.distributions import Categorical

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
args = SimpleNamespace(
    num_envs=4, num_steps=8, num_iterations=6, update_epochs=2, num_minibatches=2,
    learning_rate=2.5e-3, gamma=0.99, gae_lambda=0.95, clip_coef=0.2, ent_coef=0.01, vf_coef=0.5,
    max_grad_norm=0.5,
)  # fmt: skip
args.batch_size = args.num_envs * args.num_steps
args.minibatch_size = args.batch_size // args.num_minibatches


class VectorEnv:
    """Points that are rewarded for staying near the origin."""

    def reset(self):
        self.state = torch.randn(args.num_envs, 4)
        return self.state

    def step(self, action):
        push = (2.0 * action - 1.0)[:, None]
        self.state = 0.9 * self.state + 0.1 * push + 0.05 * torch.randn(args.num_envs, 4)
        done = (self.state.abs().amax(1) > 3).double()
        self.state = torch.where(done[:, None] > 0, torch.randn(args.num_envs, 4), self.state)
        return self.state, -self.state.pow(2).sum(1), done


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, 0.0)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(4, 16)), nn.Tanh(), layer_init(nn.Linear(16, 1), std=1.0)
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(4, 16)), nn.Tanh(), layer_init(nn.Linear(16, 2), std=0.01)
        )

    def forward(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


run = elastic.join()
envs = VectorEnv()
agent = run.wrap(Agent())
optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
run.track(optimizer=optimizer)

obs = torch.zeros(args.num_steps, args.num_envs, 4)
actions, logprobs, rewards, dones, values = torch.zeros(5, args.num_steps, args.num_envs)


def rollout():
    next_obs, next_done = envs.reset(), torch.zeros(args.num_envs)
    for t in range(args.num_steps):
        obs[t], dones[t] = next_obs, next_done
        with torch.no_grad():
            action, logprob, _, value = agent(next_obs)
        actions[t], logprobs[t], values[t] = action, logprob, value.flatten()
        next_obs, rewards[t], next_done = envs.step(action)
    with torch.no_grad():
        next_value = agent(next_obs)[3].flatten()
    advantages, lastgaelam = torch.zeros_like(rewards), 0
    for t in reversed(range(args.num_steps)):
        last = t == args.num_steps - 1
        nonterminal = 1.0 - (next_done if last else dones[t + 1])
        following = next_value if last else values[t + 1]
        delta = rewards[t] + args.gamma * following * nonterminal - values[t]
        lastgaelam = delta + args.gamma * args.gae_lambda * nonterminal * lastgaelam
        advantages[t] = lastgaelam
    return advantages, advantages + values


def train():
    while True:
        step = run.begin()
        if step.number == args.num_iterations:
            return
        frac = 1.0 - step.number / args.num_iterations
        optimizer.param_groups[0]["lr"] = frac * args.learning_rate
        advantages, returns = rollout()
        b_obs, b_actions, b_logprobs = obs.reshape(-1, 4), actions.flatten(), logprobs.flatten()
        b_advantages, b_returns = advantages.flatten(), returns.flatten()
        for epoch in range(args.update_epochs):
            for mb in torch.randperm(args.batch_size).split(args.minibatch_size):
                _, newlogprob, entropy, newvalue = agent(b_obs[mb], b_actions[mb])
                ratio = (newlogprob - b_logprobs[mb]).exp()
                adv = b_advantages[mb]
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                pg_loss = torch.max(-adv * ratio, -adv * clipped).mean()
                v_loss = 0.5 * (newvalue.flatten() - b_returns[mb]).pow(2).mean()
                loss = pg_loss - args.ent_coef * entropy.mean() + args.vf_coef * v_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
        run.commit()


run.retry(train)
result = agent.state_dict()
