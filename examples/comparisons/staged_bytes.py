"""torch.distributed.checkpoint stages the entire replicated state on every rank.

`async_save` copies everything first and plans afterwards; the plan then drops the parts that other
ranks write. With W ranks on a node, that takes W times the state in host memory, and W times the
copying while training waits. Ours plans first: each rank stages 1/W.

    $ python examples/comparisons/staged_bytes.py
    of 256 MiB in 4 ranks, each stages: DCP 257, ours 70 MiB
"""

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

import checkpoints

SIZE, MIB = 4, 256


def resident_mib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(rank, folder):
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", SIZE),
        rank=rank,
        world_size=SIZE,
        timeout=timedelta(seconds=60),
    )
    state = {f"tensor{i}": torch.ones(MIB << 14) for i in range(16)}
    dist.barrier()
    before = resident_mib()
    with checkpoints.Engine(f"{folder}/ours") as engine:
        world = checkpoints.WriterGroup(nonce="aa", rank=rank, size=SIZE)
        handle = engine.save_async(state, step=1, world=world)
        ours = resident_mib() - before
        handle.wait()
    dist.barrier()
    before = resident_mib()
    future = async_save(state, checkpoint_id=f"{folder}/dcp")
    theirs = resident_mib() - before
    future.result()
    dist.barrier()
    if rank == 1:
        print(f"of {MIB} MiB in {SIZE} ranks, each stages: DCP {theirs:.0f}, ours {ours:.0f} MiB")


os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
with tempfile.TemporaryDirectory() as folder:
    pids = []
    for rank in range(SIZE):
        pids.append(os.fork())
        if pids[-1] == 0:
            run(rank, folder)
            os._exit(0)
    for pid in pids:
        os.waitpid(pid, 0)
