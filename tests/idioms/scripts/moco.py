"""A momentum encoder and a queue (MoCo)

Both are buffers of a tracked module. New queue entries are gathered from all ranks in rank order,
so their order depends on the number of workers.

Compared: among ranks only, because the queue follows the order of the ranks
Group: Models
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))

run = elastic.join()
encoder = nn.Linear(4, 3)
momentum_encoder = copy.deepcopy(encoder).requires_grad_(False)
model = run.wrap(encoder)
memory = nn.Module()
memory.register_buffer("queue", F.normalize(torch.randn(24, 3), dim=1))
memory.register_buffer("pointer", torch.zeros((), dtype=torch.long))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
run.track(optimizer=optimizer, momentum_encoder=momentum_encoder, memory=memory)
loader = run.loader(DataLoader(dataset, batch_size=8, shuffle=True), global_batch=12)


@torch.no_grad()
def enqueue(keys):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, keys.tolist())
    everybody = torch.tensor([key for part in parts for key in part])
    pointer = int(memory.pointer)
    memory.queue[pointer : pointer + len(everybody)] = everybody
    memory.pointer.fill_((pointer + len(everybody)) % 24)


def train():
    for epoch in run.epochs(2):
        for inputs, _ in loader:
            with torch.no_grad():
                for k, q in zip(momentum_encoder.parameters(), model.parameters()):
                    k.data = k.data * 0.9 + q.data * 0.1
                keys = F.normalize(momentum_encoder(inputs), dim=1)
            query = F.normalize(model(inputs), dim=1)
            positive = (query * keys).sum(1, keepdim=True)
            negative = query @ memory.queue.clone().T
            logits = torch.cat([positive, negative], dim=1)
            loss = F.cross_entropy(logits, torch.zeros(len(inputs), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            enqueue(keys)


run.retry(train)
result = {**model.state_dict(), "queue": memory.queue, "pointer": memory.pointer}
