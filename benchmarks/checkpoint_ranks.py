"""Parts of the checkpoint benchmark that need processes: loading together, and being killed."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import checkpoints
import checkpoints.loading
from elastic.testing.forks.child import fork

State = dict[str, torch.Tensor]


def load_together(
    folder: Path, size: int, state: State, raw: Path, subjects: dict[str, Path], rounds: int
) -> list[tuple[str, float, float]]:
    """How long the slowest of ``size`` ranks, real processes with gloo, needs to load together.

    In every round each subject loads once, after all ranks have read the raw bytes: (subject,
    seconds of the raw read, seconds of the load). The first round, which finds the memory, is
    left out.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = folder / f"store-{size}-{time.monotonic_ns()}"

    def rank_of(rank: int) -> Callable[[], None]:
        def work() -> None:
            files = dist.FileStore(str(store), size)  # type: ignore[attr-defined]
            limit = timedelta(seconds=300)
            dist.init_process_group("gloo", store=files, rank=rank, world_size=size, timeout=limit)
            into = {name: torch.ones_like(tensor) for name, tensor in state.items()}

            def timed(subject: str, path: Path) -> float:
                dist.barrier()
                began = time.perf_counter()
                load(subject, path, into)
                return time.perf_counter() - began

            found = []
            for _ in range(rounds + 1):
                for subject, path in subjects.items():
                    found.append((timed("raw read", raw), timed(subject, path)))
                    assert all(bool((into[n][-3:] == state[n][-3:]).all()) for n in state)
            store.with_suffix(f".{rank}").write_text(json.dumps(found))

        return work

    pids = [fork(rank_of(rank)) for rank in range(size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        raise RuntimeError(f"{[*subjects]}: ranks ended with {codes}")
    of_ranks = [json.loads(store.with_suffix(f".{rank}").read_text()) for rank in range(size)]
    names = list(subjects) * (rounds + 1)
    slowest = [
        (name, max(raw_s for raw_s, _ in pairs), max(took_s for _, took_s in pairs))
        for name, *pairs in zip(names, *of_ranks, strict=True)
    ]
    return slowest[len(subjects) :]


def load(subject: str, path: Path, into: State) -> None:
    if subject == "raw read":
        read_raw(path, list(into.values()))
    elif subject == "DCP":
        dcp_load(into, checkpoint_id=path)
    else:
        found = checkpoints.list_checkpoints(path)[0]
        page_cache_identity = vars(checkpoints.loading)["page_cache_identity"]
        if "other hosts" in subject:  # they exchange over the group
            vars(checkpoints.loading).update(page_cache_identity=lambda storage, name: None)
        checkpoints.load(path, found.name, into=into, group=dist.group.WORLD)
        vars(checkpoints.loading).update(page_cache_identity=page_cache_identity)


def read_raw(path: Path, into: list[torch.Tensor]) -> None:
    """The floor: the same bytes into the same tensors, whatever they are."""
    with open(path, "rb", buffering=0) as file:
        for tensor in into:
            file.readinto(tensor.numpy().data)


def bad_after_kills(root: Path, kills: int, seed: int) -> int:
    """How many of ``kills`` saving processes left a listed but incomplete checkpoint.

    A child saves in the background, step after step, and is killed at a random instant after
    its first commit. Each tensor contains its step: a mixture of steps is detected.
    """
    chance = random.Random(seed)
    bad = 0
    for generation in range(1, kills + 1):
        is_saved = _killed(root, generation, chance.uniform(0, 0.02))
        listed = checkpoints.list_checkpoints(root)
        newest = checkpoints.latest(root)
        right = bool(is_saved and listed and not newest.skipped)
        for info in listed:
            try:
                state = checkpoints.load(root, info.name).state
            except checkpoints.LoadError:
                right = False
            else:
                right &= all(bool((t == info.step).all()) for t in state.values())
        bad += not right
    return bad


def _killed(root: Path, generation: int, delay_s: float) -> bytes:
    reader, writer = os.pipe()
    pid = fork(lambda: _save_forever(root, generation, writer))
    os.close(writer)
    select.select([reader], [], [], 60)
    time.sleep(delay_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    message = os.read(reader, 1)
    os.close(reader)
    return message


def _save_forever(root: Path, generation: int, pipe: int) -> None:
    nonce = f"{generation:04x}"
    checkpoints.collect_garbage(root, generation=generation, nonce=nonce)
    origin = checkpoints.latest(root).checkpoint
    step = origin.step if origin else 0
    world = checkpoints.WriterGroup(
        nonce=nonce, generation=generation, lineage=checkpoints.derive_lineage(origin, generation)
    )
    state = {name: torch.zeros(40_000, dtype=torch.int64) for name in "ab"}
    engine = checkpoints.Engine(root, busy="wait")
    while True:
        step += 1
        for tensor in state.values():
            tensor.fill_(step)
        engine.save_async(state, step=step, world=world)
        if any(o.status is checkpoints.SaveStatus.COMMITTED for o in engine.outcomes()):
            os.write(pipe, b"c")
