"""Variable-length sequences with `collate_fn`

Group: Data
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
sequences = [torch.randint(1, 20, (3 + i % 5,)) for i in range(60)]


def collate(batch):
    padded = pad_sequence(batch, batch_first=True)
    return padded, (padded != 0).sum(1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6, padding_idx=0)
        self.head = nn.Linear(6, 1)

    def forward(self, tokens, lengths):
        return self.head(self.embedding(tokens).sum(1) / lengths[:, None])


run = elastic.join()
model = run.wrap(Model())
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
data = DataLoader(sequences, batch_size=8, shuffle=True, collate_fn=collate)
loader = run.loader(data, global_batch=12)


def train():
    for epoch in run.epochs(4):
        for tokens, lengths in loader:
            loss = F.mse_loss(model(tokens, lengths)[:, 0], lengths.double())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
