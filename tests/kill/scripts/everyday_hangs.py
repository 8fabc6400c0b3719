"""A common training loop, with mistakes that make one of its ranks hang.

A file ``hang-MISTAKE`` in the folder, which contains the name of a node, orders a mistake.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from regression_job import JobArguments, Waves, join, network, save_weights
from torch.utils.data import DataLoader, Dataset

LONG_S = 1e6
CACHE_LOCK = threading.Lock()  # of a cache that data workers fill
LIBC = ctypes.CDLL(None)
PYTHON_AND_LIBC = ctypes.PyDLL(None)  # calls hold the interpreter lock
# A mutex of a C library, as in the thread pool of tokenizers.
POOL_MUTEX = ctypes.create_string_buffer(64)


class Cached(Dataset[torch.Tensor]):
    """Reads through a cache with a Python lock."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        with CACHE_LOCK:
            return torch.zeros(1)


class Tokenized(Dataset[torch.Tensor]):
    """Calls a C library that has a lock."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        LIBC.pthread_mutex_lock(POOL_MUTEX)
        return torch.zeros(1)


def fork_with_a_lock_held(folder: Path) -> None:
    """Another thread holds the cache's lock when the data workers are forked: their copy of the
    lock is never released.
    """
    with CACHE_LOCK:
        loader = iter(DataLoader(Cached(), num_workers=1))
    next(loader)


def fork_with_tokenizers(folder: Path) -> None:
    LIBC.pthread_mutex_lock(POOL_MUTEX)
    loader = iter(DataLoader(Tokenized(), num_workers=1))
    LIBC.pthread_mutex_unlock(POOL_MUTEX)
    next(loader)


def read_a_file_that_nobody_writes(folder: Path) -> None:
    path = folder / f"shard-{os.getpid()}"
    os.mkfifo(path)
    path.read_bytes()


def ask_a_person(folder: Path) -> None:
    _, terminal = os.openpty()  # inherited by a worker if torchrun runs in a terminal
    os.dup2(terminal, 0)
    sys.stdin = open(0)  # noqa: SIM115
    input("overwrite the checkpoint? ")


def save_onto_a_stuck_pipe(folder: Path) -> None:
    path = folder / f"upload-{os.getpid()}"
    os.mkfifo(path)
    nobody_reads = os.open(path, os.O_RDWR)
    with path.open("wb") as upload:
        torch.save({"weights": torch.zeros(1_000_000)}, upload)
    os.close(nobody_reads)


def sleep_in_a_callback(folder: Path) -> None:
    time.sleep(LONG_S)


def wait_for_a_thread_in_c(folder: Path) -> None:
    """A thread in C does not release the interpreter lock."""
    threading.Thread(target=PYTHON_AND_LIBC.sleep, args=(600,), daemon=True).start()
    time.sleep(0.1)


def wait_at_a_barrier_alone(folder: Path) -> None:
    dist.barrier()


MISTAKES: Mapping[str, Callable[[Path], None]] = {
    "fork-lock": fork_with_a_lock_held,
    "tokenizers": fork_with_tokenizers,
    "file": read_a_file_that_nobody_writes,
    "input": ask_a_person,
    "pipe": save_onto_a_stuck_pipe,
    "callback": sleep_in_a_callback,
    "thread-in-c": wait_for_a_thread_in_c,
    "barrier": wait_at_a_barrier_alone,
}


def make_mistakes(folder: Path, node: str) -> None:
    """Make the mistakes that this node is ordered to make."""
    for name, make in MISTAKES.items():
        order = folder / f"hang-{name}"
        try:
            ordered = order.read_text()
        except FileNotFoundError:
            continue  # there is no order, or another worker has taken it
        if ordered == node:
            order.unlink()
            make(folder)


def main() -> None:
    job = JobArguments.read()
    node = os.environ.get("ELASTIC_NODE_NAME", "")

    run = join(job)
    module = network()
    model = run.wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run.track(optimizer=optimizer)
    data = Waves(job.samples, lambda: None)
    loader = run.loader(
        DataLoader(data, batch_size=job.batch, shuffle=True), global_batch=job.batch
    )

    def train() -> None:
        for epoch in run.epochs(job.epochs):
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                make_mistakes(job.folder, node)
                job.pause_after_step(epoch)

    run.retry(train)
    save_weights(run, module, job.folder)


if __name__ == "__main__":
    main()
