"""An object that is not a `DataLoader`

Pass the wrapper together with the DataLoader inside it.

```python
loader = run.loader(wrapper, dataloader=inner)
```

Refused: not a DataLoader: list
"""

import torch
from torch.utils.data import TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
loader = run.loader([dataset[:8], dataset[8:16]])
