"""Keeps the data workers of a loader when the world changes.

torch starts the workers of a ``DataLoader`` with an iterator and ends them with it, unless they are
persistent: then the next iterator gives them other batches (``_reset`` in
torch/utils/data/dataloader.py). A change of the world in the middle of an epoch needs other
batches, not other workers, and starting workers takes longer than the rest of a recovery. So
they persist within an epoch; at its end they are stopped, unless the user's loader has persistent
workers.
"""

from __future__ import annotations

import queue
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DataLoader

from elastic import torch_private


def make_ready_to_fork() -> None:
    """Initialize torch's shared-memory code before data workers are forked.

    It has a C++ static that is initialized at first use, under a lock of glibc that each thread
    takes at the first use of any static (``__cxa_atexit``). If a worker is forked while a thread of
    this process holds the lock, the worker waits for it forever, in
    ``at::NewProcessWideShmHandle``, and the job hangs: 2 of about 40 jobs that started while a
    low-priority writer thread ran [measured, torch 2.13]. A static initialized before the fork is
    not initialized again.
    """
    with suppress(RuntimeError):  # no shared memory: code that needs it will raise
        # Both uses of shared memory: for samples and for batches.
        torch.zeros(1, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        torch_private.use_shared_memory()


class DataWorkers:
    """The data workers of one loader, which is a private copy of the user's.

    The owner calls :meth:`enter` before it creates an iterator, and :meth:`stop` when the epoch
    was read to its end, or was left deliberately.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._epoch: int | None = None
        # Loaders that iterate differently (prefetching in a thread) may still read from the
        # iterator of an ended world: their workers end with it, as in torch.
        own_way = not torch_private.iterates_as_torch_does(type(loader))
        self._are_kept = loader.num_workers > 0 and not loader.persistent_workers and not own_way
        if self._are_kept:
            object.__setattr__(loader, "persistent_workers", True)

    def enter(self, epoch: int) -> None:
        """Prepare for a new iterator: keep workers of ``epoch``, end workers of other epochs."""
        if self._epoch != epoch:
            self.stop()
        self._epoch = epoch
        # Batches of the old world that no worker has begun are skipped.
        for tasks in torch_private.unread_tasks(self._loader):
            with suppress(queue.Empty):
                while True:
                    tasks.get_nowait()

    def stop(self) -> None:
        """End the workers with the last iterator, as torch does by default."""
        if self._are_kept:
            torch_private.forget_iterator(self._loader)
