"""GRPO: sampled completions, several updates on each batch, and a moving baseline

The completions are generated within the step, with the unwrapped module, from one generator per
prompt, so they do not depend on the world. A step with several updates is undone as a whole. The
baseline is in `run.state`, and its rewards are averaged over all ranks.

Group: The loop
"""

import torch
from torch import nn
from torch.utils.data import DataLoader

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
prompts = torch.randint(0, 11, (24, 2))
GROUP, NEW, UPDATES = 3, 3, 2


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, ids):
        lengths = torch.arange(1, ids.shape[1] + 1)[:, None]
        return self.head((self.embedding(ids).cumsum(1) / lengths).tanh())

    @torch.no_grad()
    def generate(self, ids, generator):
        for _ in range(NEW):
            probabilities = self(ids)[:, -1].softmax(-1)
            new = torch.multinomial(probabilities, 1, generator=generator)
            ids = torch.cat([ids, new], 1)
        return ids


run = elastic.join()
policy = run.wrap(LanguageModel())
optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(torch.arange(24), batch_size=4, shuffle=True), global_batch=5)


def log_probabilities(ids):
    logits = policy(ids)[:, :-1].log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, 1:]


def sample(index):
    generator = torch.Generator().manual_seed(int(index))
    return policy.module.generate(prompts[index].expand(GROUP, 2), generator)


def train():
    run.state.setdefault("baseline", 0.0)
    for epoch in run.epochs(2):
        for indices in loader:
            ids = torch.cat([sample(index) for index in indices])
            rewards = (ids[:, 2:] % 2 == 0).double().mean(1)
            mean = run.mean(len(rewards), reward=rewards.mean())["reward"]
            run.state["baseline"] = 0.9 * run.state["baseline"] + 0.1 * mean
            groups = rewards.view(-1, GROUP)
            advantages = (groups - groups.mean(1, keepdim=True)).flatten()
            advantages = (advantages + 0.1 * (rewards - run.state["baseline"]))[:, None]
            with torch.no_grad():
                old = log_probabilities(ids)
            for _ in range(UPDATES):
                ratio = (log_probabilities(ids) - old).exp()
                clipped = ratio.clamp(0.8, 1.2)
                loss = -torch.min(ratio * advantages, clipped * advantages).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


run.retry(train)
result = {**policy.state_dict(), "baseline": torch.tensor(run.state["baseline"])}
