"""An object of a class of the script in `run.state`

Checkpoints and messages to other ranks hold tensors, NumPy arrays, numbers, strings, enumerations,
and dicts, lists, tuples, named tuples, sets and deques of them, also in an object's `state_dict`.

```python
class Best(typing.NamedTuple): epoch: int; loss: float
run.state["best"] = dataclasses.asdict(best)    # or an object with state_dict, tracked
```

Refused: state['best'] is a __main__.Best, which cannot be stored
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))


@dataclasses.dataclass
class Best:
    epoch: int = 0


run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


def train():
    run.state.setdefault("best", Best())
    for epoch in run.epochs(4):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            run.state["best"].epoch = epoch


run.retry(train)
