"""A set, or an array, in `run.state`

Checkpoints and messages to other ranks hold no sets, deques, NumPy arrays or NumPy numbers.

```python
run.state["seen"] = sorted(seen)            # or list(a_deque), torch.from_numpy(array)
run.state["best"] = float(best)             # of numpy.float32
```

Refused: run.state: state['seen'] is a builtins.set
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    run.state.setdefault("seen", set())
    for epoch in run.epochs(4):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            run.state["seen"].add(epoch)


run.retry(train)
