"""A batch sampler of one's own

Buckets of sequences of similar length. A batch is never divided: a step has `global_batch` batches,
and each rank gets some of them, in one batch unless the loader has `micro_batch=1`. Padding is
masked, because batches are padded to other lengths in another world.

Group: Data
"""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Sampler

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
lengths = torch.randint(2, 9, (96,)).tolist()
sequences = [torch.randn(n, 4) for n in lengths]


class ByLength(Sampler):
    def __init__(self, lengths, batch_size):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self.batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]

    def __iter__(self):
        random.shuffle(self.batches)
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def pad(samples):
    padded = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    mask = torch.arange(padded.shape[1]) < torch.tensor([[len(one)] for one in samples])
    return padded, mask.unsqueeze(2), torch.stack([one.sin().mean() for one in samples])


run = elastic.join()
model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
data = DataLoader(sequences, batch_sampler=ByLength(lengths, 5), collate_fn=pad)
loader = run.loader(data, global_batch=3)


def train():
    for epoch in run.epochs(3):
        for inputs, mask, targets in loader:
            optimizer.zero_grad()
            outputs = (model(inputs) * mask).sum((1, 2))
            F.mse_loss(outputs, targets).backward()
            optimizer.step()


run.retry(train)
result = model.state_dict()
