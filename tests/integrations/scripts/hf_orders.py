"""Compares the order of samples with that of Accelerate's loaders on every rank."""

import itertools
import sys
from types import SimpleNamespace

import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
from transformers.trainer_pt_utils import LengthGroupedSampler

from elastic.integrations.transformers import _Plan

SEED, ACCUMULATED = 5, 2


def sampler_of(kind: str, samples: int):
    if kind == "lengths":
        return LengthGroupedSampler(2, lengths=[i % 7 + 1 for i in range(samples)])
    generator = torch.Generator().manual_seed(3) if kind == "generator" else None
    return WeightedRandomSampler([i + 1.0 for i in range(samples)], samples, generator=generator)


def of_accelerate(loader, ranks, even, split):
    """The batches that each rank reads in two epochs; ``even``: all have as many."""
    read = []
    generator = getattr(loader.sampler, "generator", None)
    state = None if generator is None else generator.get_state()
    for rank in range(ranks):
        torch.manual_seed(SEED)
        if state is not None:
            generator.set_state(state)
        prepared = prepare_data_loader(
            loader,
            torch.device("cpu"),
            num_processes=ranks,
            process_index=rank,
            split_batches=split,
            even_batches=even,
            use_seedable_sampler=True,
        )
        epochs = []
        for epoch in range(2):
            prepared.set_epoch(epoch)
            epochs.append([batch[0].tolist() for batch in prepared])
        read.append(epochs)
    if state is not None:
        generator.set_state(state)
    return read


compared = 0
for kind, samples, ranks, drops, even, split in itertools.product(
    ("shuffled", "lengths", "weighted", "generator"),
    (12, 13, 50),
    (1, 2, 3),
    (False, True),
    (True, False),
    (False, True),
):
    size = 6 if split else 4
    data = TensorDataset(torch.arange(samples))
    if kind == "shuffled":
        loader = DataLoader(data, batch_size=size, shuffle=True, drop_last=drops)
    else:
        sampler = sampler_of(kind, samples)
        loader = DataLoader(data, batch_size=size, sampler=sampler, drop_last=drops)
    config = SimpleNamespace(even_batches=even, use_seedable_sampler=True, split_batches=split)
    args = SimpleNamespace(seed=SEED, data_seed=None, gradient_accumulation_steps=ACCUMULATED)
    loaders = SimpleNamespace(dataloader_config=config)
    owner = SimpleNamespace(accelerator=loaders, args=args, first_epoch=lambda: 0)
    torch.manual_seed(SEED)
    plan = _Plan(loader, owner, ranks)
    read = of_accelerate(loader, ranks, even, split)
    for epoch in (1, 0, 1):
        ours = plan.order(epoch)
        batches = max(len(each[epoch]) for each in read)
        case = kind, samples, ranks, drops, even, split, epoch
        if plan.is_batched:
            assert ours == read[0][epoch], case
            assert plan.per_update == ACCUMULATED, case
        else:
            per_batch = plan.per_update // ACCUMULATED
            for number in range(batches):
                theirs = [i for each in read for b in each[epoch][number : number + 1] for i in b]
                mine = ours[number * per_batch : (number + 1) * per_batch]
                assert sorted(mine) == sorted(theirs), (case, number, mine, theirs)
        assert plan.batches == batches, case
        compared += 1
result = {"compared": compared}
print(compared, sys.argv)
