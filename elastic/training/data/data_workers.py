"""The data workers of a loader, kept while the world changes around them.

torch starts the workers of a ``DataLoader`` with an iterator and ends them with it, unless they are
persistent: then the next iterator gives them other batches (``_reset`` in
torch/utils/data/dataloader.py). A change of the world in the middle of an epoch asks for other
batches, not for other workers, and starting them takes longer than all else in a recovery. So
within an epoch they persist; at its end they are stopped, unless the user's loader has persistent
ones.
"""

from __future__ import annotations

import queue
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DataLoader

from elastic import torch_private


def make_ready_to_fork() -> None:
    """Have torch set up what every data worker uses to send batches, here and now.

    It is a static of C++, made when first used: under a lock of glibc's that each thread takes that
    uses anything for the first time (``__cxa_atexit``). If a worker is forked while a thread here
    holds it, that worker waits for it forever, in ``at::NewProcessWideShmHandle``, and the job with
    it: 2 of about 40 jobs that started while a writer thread of low priority ran [measured, torch
    2.13]. What is made before the fork is not made again.
    """
    with suppress(RuntimeError):  # no shared memory: code that needs it gets an error
        # Both ways into shared memory: that of samples, and that of batches.
        torch.zeros(1).share_memory_()  # type: ignore[no-untyped-call]
        torch_private.use_shared_memory()


class DataWorkers:
    """Of one loader, a private copy of the user's.

    Its user calls :meth:`enter` before creating each iterator, and
    :meth:`let_go` when the epoch is read, or left by the script's own will.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._epoch: int | None = None
        # Loaders that iterate in their own way (ahead, in a thread) may still read from the
        # iterator of a world that is over: theirs end with it, as they are used to.
        own_way = not torch_private.iterates_as_torch_does(type(loader))
        self._are_kept = loader.num_workers > 0 and not loader.persistent_workers and not own_way
        if self._are_kept:
            object.__setattr__(loader, "persistent_workers", True)

    def enter(self, epoch: int) -> None:
        """An iterator is about to be made: workers of ``epoch`` are kept, those of others end."""
        if self._epoch != epoch:
            self.let_go()
        self._epoch = epoch
        # Batches of the old world that no worker has begun to read need not be read.
        for tasks in torch_private.unread_tasks(self._loader):
            with suppress(queue.Empty):
                while True:
                    tasks.get_nowait()

    def let_go(self) -> None:
        """End the workers with the last iterator, as torch does by default."""
        if self._are_kept:
            torch_private.forget_iterator(self._loader)
