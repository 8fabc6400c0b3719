"""The process group of one world: built when the world begins, destroyed when the process ends.

Clean ends destroy it. After an exception nothing is called: NCCL's destroy waits for queued
collectives, and a peer that is gone will never answer them.
"""

from __future__ import annotations

import dataclasses
import datetime
import os

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from elastic.errors import ConfigError
from elastic.worker.collectives import broadcast_json
from elastic.worker.greeting import greet
from elastic.worker.world import World, fresh_nonce, world_from_environment

# The one place for the limit of a collective. Long, because rank 0 may evaluate for minutes
# while the others wait; short enough that a hang without a watchdog ends on the same day.
COLLECTIVE_TIMEOUT_S = 1800.0
_TIMEOUT = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)


def choose_device() -> torch.device:
    """This worker's device: ``cuda:LOCAL_RANK`` where there is CUDA, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this node has {torch.cuda.device_count()}",
            hint="lower --nproc-per-node, or hide the GPUs with CUDA_VISIBLE_DEVICES= to use CPUs",
        )
    return torch.device("cuda", local_rank)


class ProcessGroup:
    """Owns torch's default group for one world at a time."""

    def __init__(self, device: torch.device, backend: str | None) -> None:
        self._device = device
        self._backend = backend or ("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
        self._owned = False

    def form(self) -> World:
        """Build the group that the environment describes and agree on what it leaves open."""
        world = world_from_environment()
        if dist.is_initialized():  # the script had built a group of its own
            world = dataclasses.replace(world, rank=dist.get_rank(), size=dist.get_world_size())
            nonce = broadcast_json(fresh_nonce() if world.rank == 0 else None)
            return dataclasses.replace(world, nonce=world.nonce or str(nonce))
        store = _store(world)
        if not world.nonce:
            nonce = greet(store, world.rank, world.size, timeout_s=COLLECTIVE_TIMEOUT_S)
            world = dataclasses.replace(world, nonce=nonce)
        dist.init_process_group(
            self._backend,
            store=PrefixStore(world.nonce, store),
            rank=world.rank,
            world_size=world.size,
            timeout=_TIMEOUT,
            device_id=self._device if self._device.type == "cuda" else None,
        )
        self._owned = True
        return world

    def destroy(self) -> None:
        """Take the group down at a clean end; a group the script made is left to it."""
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()
        self._owned = False


def _store(world: World) -> Store:
    if not world.is_launched:
        return HashStore()
    store: Store = next(dist.rendezvous("env://", timeout=_TIMEOUT))[0]  # type: ignore[attr-defined]
    return store
