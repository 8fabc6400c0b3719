"""Runs an example with replicas as paced_run.py does; its ranks die at ordered points.

A file ``die-POINT`` in the folder is an order to the first rank that reaches the point,
``die-POINT-RANK`` one to that rank of the world. The rank that deletes the file kills itself. An
order that contains a number applies to that many ranks in the same step, once each of them is at
the point. With ``hang-POINT`` a rank blocks there.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import paced_run
import safetensors.torch
import torch.distributed as dist
from job_arguments import job_parser
from kit import device_stream, nccl_semantics
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import elastic
from checkpoints import LocalStorage
from checkpoints.names import MANIFEST
from checkpoints.testing import FaultyStorage
from elastic.groups.group import ProcessGroup
from elastic.groups.replica import ModelReplica
from elastic.train import transfer
from elastic.train.sharded import AcrossReduction

# Less than the hang budget of a waiting rank.
OTHERS_COME_WITHIN_S = 2.0
STAYS_S = 3600.0


class Orders:
    """The orders of this rank to die."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def obey(self, point: str) -> None:
        """Die, or block here, if ordered to."""
        with suppress(FileNotFoundError):
            (self._folder / f"hang-{point}").unlink()
            time.sleep(STAYS_S)
        for name in (f"die-{point}", f"die-{point}-{os.environ.get('RANK')}"):
            if self._take(self._folder / name, point):
                os.kill(os.getpid(), signal.SIGKILL)

    def _take(self, order: Path, point: str) -> bool:
        try:
            together = order.read_text()
            if together:
                return self._is_agreed(order, point, int(together))
            order.unlink()
        except FileNotFoundError:
            return False
        return True

    def _is_agreed(self, order: Path, point: str, ranks: int) -> bool:
        """Whether that many ranks are at the point and die there. If not, the order remains for the
        next step: another rank may have passed the point before the order.
        """
        ready = order.with_name(order.name.replace("die-", "ready-", 1))
        agreed = self._folder / f"agreed-{point}"
        with self._lock():
            order.rename(ready)
            if len(list(self._folder.glob(f"ready-{point}-*"))) == ranks:
                agreed.touch()
        deadline = time.monotonic() + OTHERS_COME_WITHIN_S
        while time.monotonic() < deadline and not agreed.exists():
            time.sleep(0.001)
        with self._lock():
            if not agreed.exists():
                ready.rename(order)
                return False
            return True

    @contextmanager
    def _lock(self) -> Iterator[None]:
        with open(self._folder / "orders.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def die_in_a_step(orders: Orders) -> None:
    """In the order of a step: all-gather, forward, backward, reduce-scattered, all-reduced,
    clipping, optimizer, optimizer-done, committed, mean. Some of them occur more than once."""
    gather_name = "all_gather_single"
    if not hasattr(dist, gather_name):
        gather_name = "all_gather_into_tensor"  # up to torch 2.12
    gather, clip, join = getattr(dist, gather_name), nn.utils.clip_grad_norm_, elastic.join
    wrap, mean, reduce = elastic.Run.wrap, elastic.Run.mean, AcrossReduction.reduce

    def gathering(*args: Any, **options: Any) -> Any:
        work = gather(*args, **options)
        orders.obey("all-gather")  # while it is in progress
        return work

    def wrapping(run: Any, module: nn.Module, **ddp: Any) -> Any:
        wrapped = wrap(run, module, **ddp)
        middle = next(part for part in module.modules() if isinstance(part, nn.LayerNorm))
        middle.register_forward_pre_hook(lambda *_: orders.obey("forward"))
        middle.register_full_backward_hook(lambda *_: orders.obey("backward"))
        return wrapped

    def reducing(self: AcrossReduction, gradients: Any, unit: Any = None) -> None:
        orders.obey("reduce-scattered")
        reduce(self, gradients, unit)
        orders.obey("all-reduced")  # of one group of parameters, and others are not

    def clipping(*args: Any, **options: Any) -> Any:
        orders.obey("clipping")
        return clip(*args, **options)

    def averaging(*args: Any, **values: Any) -> Any:
        orders.obey("mean")
        return mean(*args, **values)

    def joining(**given: Any) -> elastic.Run:
        run = join(**given)
        run.after_step(lambda step: orders.obey("committed"))
        return run

    setattr(dist, gather_name, gathering)
    nn.utils.clip_grad_norm_ = clipping
    elastic.join = joining
    elastic.Run.wrap = wrapping  # type: ignore[method-assign, assignment]
    elastic.Run.mean = averaging  # type: ignore[method-assign]
    AcrossReduction.reduce = reducing  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(lambda *_: orders.obey("optimizer"))
    register_optimizer_step_post_hook(lambda *_: orders.obey("optimizer-done"))


def die_in_a_recovery(orders: Orders) -> None:
    """Points of a starting rank: meeting, met. Of all ranks: building, built, agreeing; then those
    of the transfer.
    """
    form, build, total = ModelReplica.form, ProcessGroup.build, ModelReplica.sum
    finish_chunk, check = transfer.ChunkedTransfer.finish_chunk, transfer.check_hashes

    def forming(*args: Any) -> None:
        orders.obey("meeting")
        form(*args)
        orders.obey("met")

    def building(*args: Any, **options: Any) -> None:
        orders.obey("building")
        build(*args, **options)
        orders.obey("built")

    def agreeing(self: ModelReplica, values: Any) -> list[float]:
        orders.obey("agreeing")
        return total(self, values)

    def moving(self: Any, sent: Any) -> None:  # once a chunk is in transit
        if self._flat:
            orders.obey("sending" if self._is_source else "receiving")
        finish_chunk(self, sent)

    def checking(digests: Any, route: transfer.TransferRoute, group: Any) -> None:
        if group.rank in (*route.sources, *route.receivers):
            orders.obey("sent" if group.rank in route.sources else "received")
        check(digests, route, group)

    ModelReplica.form = forming  # type: ignore[method-assign, assignment]
    ModelReplica.sum = agreeing  # type: ignore[method-assign]
    ProcessGroup.build = building  # type: ignore[method-assign]
    # So that a small model has tensors of which each source sends a part.
    transfer.SHORTEST_CHUNK_BYTES = transfer.LONGEST_CHUNK_BYTES = 256
    transfer.ChunkedTransfer.finish_chunk = moving  # type: ignore[method-assign]
    transfer.check_hashes = checking


def die_in_a_save(orders: Orders) -> None:
    """Of a checkpoint: writing, of a rank's share; committing, which follows all shares."""
    policy = elastic.Checkpoints

    def before(label: str) -> None:
        if label.startswith("write ") and "safetensors" in label:
            orders.obey("writing")
        if label.startswith("rename ") and label.endswith(MANIFEST):
            orders.obey("committing")

    def faulty(folder: Path, **options: Any) -> Any:
        return policy(folder=FaultyStorage(LocalStorage(folder), before=before), **options)

    elastic.Checkpoints = faulty  # type: ignore[assignment, misc]


def train_on_a_stream() -> None:
    """With the semantics of NCCL."""
    nccl_semantics.use_by_default()
    save = safetensors.torch.save_file

    def copy_and_save(*args: Any, **options: Any) -> None:
        device_stream.synchronize()  # as the copy of the example's weights to the CPU does
        save(*args, **options)

    safetensors.torch.save_file = copy_and_save
    form = ModelReplica.form

    def form_and_tell(*args: Any) -> None:
        form(*args)
        print("trains on", dist.get_backend(), flush=True)

    ModelReplica.form = form_and_tell  # type: ignore[method-assign, assignment]


def main() -> None:
    if os.environ.get("TRAINING_BACKEND") == nccl_semantics.NAME:
        train_on_a_stream()
    orders = Orders(job_parser().parse_known_args()[0].folder)
    die_in_a_step(orders)
    die_in_a_recovery(orders)
    die_in_a_save(orders)
    paced_run.main()


if __name__ == "__main__":
    main()
