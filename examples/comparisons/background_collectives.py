"""torch.distributed.checkpoint's asynchronous saves run collectives while training does.

`async_save` plans and commits with collectives in a background thread. On the default gloo group
these are matched with the collectives of training: one rank's plan with another rank's gradients.
The result depends on the order: a deadlock, an error, or mismatched sizes. Here two ranks save
asynchronously while they sum a tensor; a watchdog ends them.

    $ python examples/comparisons/background_collectives.py
    DCP: rank 0: stuck for 20 s, killed
    DCP: rank 1: stuck for 20 s, killed
    ours: rank 0: 200 steps, 10 checkpoints
    ours: rank 1: 200 steps, 10 checkpoints
"""

import logging
import os
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

import checkpoints

STEPS, DEADLINE_S = 200, 20.0
logging.disable(logging.ERROR)


def train(save):
    """Sum ones over both ranks, and save every 20 steps."""
    for step in range(STEPS):
        if step % 20 == 0:
            save(step)
        one = torch.ones(1000)
        dist.all_reduce(one)
        if not bool((one == 2).all()):
            return f"step {step}: a sum of ones is {one[:3].tolist()} …"
    return f"{STEPS} steps"


def dcp(rank, folder):
    state = {f"tensor{i}": torch.ones(1000) for i in range(50)}
    futures = []
    result = train(lambda step: futures.append(async_save(state, checkpoint_id=f"{folder}/{step}")))
    for future in futures:
        future.result()
    return result


def ours(rank, folder):
    state = {f"tensor{i}": torch.ones(1000) for i in range(50)}
    world = checkpoints.WriterGroup(nonce="aa", rank=rank, size=2)
    with checkpoints.Engine(folder, busy="wait", keep=checkpoints.LatestN(20)) as engine:
        result = train(lambda step: engine.save_async(state, step=step, world=world))
    return f"{result}, {len(checkpoints.list_checkpoints(folder))} checkpoints"


def run(subject, body, folder):
    pids = {}
    for rank in range(2):
        pids[rank] = os.fork()
        if pids[rank] == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            store = dist.FileStore(f"{folder}/store", 2)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
            )
            try:
                text = body(rank, f"{folder}/{subject}")
            except Exception as error:  # noqa: BLE001  shown
                text = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
            print(f"{subject}: rank {rank}: {text}", flush=True)
            os._exit(0)
    until = time.monotonic() + DEADLINE_S
    while pids and time.monotonic() < until:
        for rank, pid in list(pids.items()):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del pids[rank]
        time.sleep(0.05)
    for rank, pid in pids.items():
        print(f"{subject}: rank {rank}: stuck for {DEADLINE_S:.0f} s, killed", flush=True)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
for subject, body in (("DCP", dcp), ("ours", ours)):
    with tempfile.TemporaryDirectory() as folder:
        run(subject, body, folder)
