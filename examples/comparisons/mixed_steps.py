"""torch.distributed.checkpoint silently loads a mixture of two steps.

A second save into the same folder overwrites the files one by one, under the marker of the old
checkpoint. A process that dies in between leaves tensors of both steps, which load without error.

    $ python examples/comparisons/mixed_steps.py
    DCP: loaded a=[2.0, 2.0, 2.0, 2.0] b=[1.0, 1.0, 1.0, 1.0]
    ours: killed at each of 11 syncs, loaded a=[2.0, 2.0, 2.0, 2.0] b=[2.0, 2.0, 2.0, 2.0]
"""

import os
import tempfile

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import checkpoints


def state(step):
    return {"a": torch.full((4,), float(step)), "b": torch.full((4,), float(step))}


def dies_at_sync(number, call):
    """Run in a child that dies at its ``number``-th fsync."""
    pid = os.fork()
    if pid == 0:
        fsync, count = os.fsync, 0

        def deadly(descriptor):
            nonlocal count
            count += 1
            if count == number:
                os._exit(9)
            return fsync(descriptor)

        os.fsync = deadly
        try:
            call()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def dcp_save(step):
    writer = FileSystemWriter(f"{folder}/dcp", single_file_per_rank=False)
    save(state(step), storage_writer=writer, no_dist=True)


with tempfile.TemporaryDirectory() as folder:
    dcp_save(1)
    dies_at_sync(1, lambda: dcp_save(2))
    live = state(0)
    load(live, checkpoint_id=f"{folder}/dcp", no_dist=True)
    print(f"DCP: loaded a={live['a'].tolist()} b={live['b'].tolist()}")

    checkpoints.save(f"{folder}/ours", state(1), step=1, nonce="aa")
    root = f"{folder}/ours"
    for number in range(1, 12):
        dies_at_sync(number, lambda: checkpoints.save(root, state(2), step=2, nonce="bb"))
        name = checkpoints.latest(root).checkpoint.name
        live = checkpoints.load(root, name).state
        assert live["a"].tolist() == live["b"].tolist()
    print(f"ours: killed at each of 11 syncs, loaded a={live['a'].tolist()} b={live['b'].tolist()}")
