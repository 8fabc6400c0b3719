"""torch.distributed.checkpoint publishes a checkpoint although one of its writer threads failed.

With several writer threads, an error in one (here: no file may grow beyond 1 MiB, as on a full
disk or over a quota) only ends that thread: `save` returns, and the marker is written.

    $ python examples/comparisons/full_disk.py
    DCP: a thread died: RuntimeError
    DCP: save returned, marker there: True
    DCP: load: CheckpointException
    ours: failed: no room to save into /tmp/tmpvfswisrg/ours: File too large
    ours: listed: [1]
"""

import os
import resource
import tempfile
import threading

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import checkpoints

state = {"large": torch.ones(1_000_000), "small": torch.ones(1000)}


def dcp_save(folder):
    """Whether save returned: it raises if the calling thread happens to take the large tensor."""
    writer = FileSystemWriter(folder, single_file_per_rank=False, thread_count=2)
    try:
        save(state, storage_writer=writer, no_dist=True)
    except CheckpointException:
        return False
    return True


threading.excepthook = lambda told: print(f"DCP: a thread died: {told.exc_type.__name__}")
with tempfile.TemporaryDirectory() as folder:
    checkpoints.save(f"{folder}/ours", state, step=1, nonce="aa")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    dcp = next(f"{folder}/dcp{n}" for n in range(100) if dcp_save(f"{folder}/dcp{n}"))
    print(f"DCP: save returned, marker there: {os.path.exists(f'{dcp}/.metadata')}")
    try:
        load({k: torch.zeros_like(v) for k, v in state.items()}, checkpoint_id=dcp, no_dist=True)
    except CheckpointException as error:
        print(f"DCP: load: {type(error).__name__}")

    with checkpoints.Engine(f"{folder}/ours") as engine:
        world = checkpoints.WriterGroup(nonce="aa")
        outcome = engine.save_async(state, step=2, world=world).wait()
    print(f"ours: {outcome.status.value}: {outcome.error.message}")
    print("ours: listed:", [c.step for c in checkpoints.list_checkpoints(f"{folder}/ours")])
