"""Dict batches moved to the device

As with Hugging Face's data collators.

Group: Data
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
features = torch.randn(96, 4)


class Examples(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return {"input": features[index], "labels": int(features[index].sum() > 0)}


run = elastic.join()
model = run.wrap(nn.Linear(4, 2).to(run.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(Examples(), batch_size=8, shuffle=True), global_batch=12)


def train():
    model.train()
    for epoch in run.epochs(2):
        for batch in loader:
            batch = {k: v.to(run.device) for k, v in batch.items()}
            outputs = model(batch["input"])
            loss = F.cross_entropy(outputs, batch["labels"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


run.retry(train)
result = model.state_dict()
