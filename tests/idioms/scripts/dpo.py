"""Direct preference optimisation (DPO) with a frozen reference model

Copy the policy before `run.retry`, and track the copy: a copy made in the training function is
refused, and without a seed each rank would copy other initial weights. A reference that is loaded
from a file need not be tracked.

Group: Models
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
prompt = torch.randint(0, 11, (48, 2))
chosen, rejected = (torch.cat([prompt, torch.randint(0, 11, (48, 4))], 1) for _ in range(2))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(11, 8), nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, ids):
        return self.head(self.rnn(self.embedding(ids))[0])


def log_probability(model, ids):
    """Of the answer, which begins at token 2."""
    logits = model(ids)[:, :-1].log_softmax(-1)
    return logits.gather(-1, ids[:, 1:, None]).squeeze(-1)[:, 1:].sum(-1)


run = elastic.join()
policy = run.wrap(LanguageModel())
reference = copy.deepcopy(policy.module).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=0.02)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 4))
run.track(optimizer=optimizer, scheduler=scheduler, reference=reference)
pairs = DataLoader(TensorDataset(chosen, rejected), batch_size=8, shuffle=True)
loader = run.loader(pairs, global_batch=10)


def train():
    for epoch in run.epochs(3):
        for preferred, other in loader:
            both = torch.cat([preferred, other])
            policy_preferred, policy_other = log_probability(policy, both).chunk(2)
            with torch.no_grad():
                reference_preferred, reference_other = log_probability(reference, both).chunk(2)
            margin = (policy_preferred - reference_preferred) - (policy_other - reference_other)
            loss = -F.logsigmoid(0.5 * margin).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            scheduler.step()


run.retry(train)
result = {
    **policy.state_dict(),
    **{f"reference.{k}": v for k, v in reference.state_dict().items()},
}
