"""A reference model copied in the training function

As in DPO, or for a penalty on the distance from the initial weights. In the next world, `run.retry`
calls its function again, and the copy would be one of the weights trained until then. A reference
that is loaded from a file may be created anywhere, and need not be tracked.

```python
reference = copy.deepcopy(policy.module).eval().requires_grad_(False)
run.track(optimizer=optimizer, reference=reference)
run.retry(train)
```

Refused: in the function of run.retry: in the next world it is called again, and would copy
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(96, 4), torch.randn(96, 4))


def main():
    run = elastic.join()
    policy = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    run.track(optimizer=optimizer)
    loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)

    def train():
        reference = copy.deepcopy(policy.module).eval().requires_grad_(False)
        for epoch in run.epochs(2):
            for chosen, rejected in loader:
                with torch.no_grad():
                    anchor = reference(chosen) - reference(rejected)
                margin = policy(chosen) - policy(rejected) - anchor
                optimizer.zero_grad()
                (-F.logsigmoid(0.1 * margin)).mean().backward()
                optimizer.step()

    run.retry(train)


if __name__ == "__main__":
    main()
