"""Saves of many tensors, into folders of many checkpoints, and into a slow storage.

Part of ``benchmarks/checkpoint.py``; alone it takes two minutes on two cores. Stalls are processor
time of the thread that trains, and so is the copy that each is compared with: other processes of
the machine may take the rest. That copy is a loop of ``copy_`` over the same tensors, the least
that a saver can do that does not know the state. For the first save without ``reserve()``, it is a
clone of each tensor: both then get fresh memory, whose pages the kernel clears at the first touch.
The pause is the longest time for which a thread that wakes up every millisecond did not, or the
processor time that this process used in it, if that is less. It is what a save's background thread
adds to a step while it holds the GIL.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from measurement import Report, Row

import checkpoints
from checkpoints import retention
from checkpoints.storage import LocalStorage, WritableFile

TENSORS = 100_000
TENSOR_BYTES = 1024
CHECKPOINTS = 100
SLOW_BYTES_PER_S = 10e6
SLOW_STATE_BYTES = 64 << 20
SAVES = 5

Note = Callable[[str, str, float, str], None]
"""Case, subject, value, unit."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", default="/dev/shm", help="a memory file system")
    args = parser.parse_args()
    samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)

    def note(case: str, subject: str, value: float, unit: str) -> None:
        samples[case, subject, unit].append(value)

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for measure in (many_tensors, many_checkpoints, slow_storage):
            measure(Path(folder), note)
    rows = tuple(Row(*key, tuple(found)) for key, found in samples.items())
    Report("checkpoint_scale", 0, rows).show(as_json=args.json)


def many_tensors(folder: Path, note: Note) -> None:
    """Stall and pause of a state of many small tensors, each copied once before for comparison."""
    case, tensors = f"{TENSORS:,} tensors", TENSORS
    state = {f"layers.{i}": torch.full((TENSOR_BYTES // 4,), float(i)) for i in range(tensors)}
    copies = [torch.empty(tensors * TENSOR_BYTES // 4).fill_(1) for _ in range(2)]
    with checkpoints.Engine(folder / "tensors", keep=checkpoints.LatestN(1)) as engine:
        engine.reserve(state)
        for step in range(1, SAVES + 1):
            views = copies[step % 2].split(TENSOR_BYTES // 4)  # type: ignore[no-untyped-call]
            copy = functools.partial(_copy, list(state.values()), list(views))
            _save_beside(case, "a copy of each", copy, engine, state, step, note)
    shutil.rmtree(folder / "tensors")
    first = f"{case}, first save without reserve()"
    for step in range(1, SAVES + 1):
        with checkpoints.Engine(folder / "tensors", keep=checkpoints.LatestN(1)) as engine:
            clone = functools.partial(_clone, list(state.values()))
            _save_beside(first, "a clone of each", clone, engine, state, step, note)
    shutil.rmtree(folder / "tensors")
    case = f"{case}, two writers"
    with checkpoints.Engine(folder / "tensors", keep=checkpoints.LatestN(1)) as engine:
        engine.reserve(state, rank=1, world_size=2)
        for step in range(1, 4):
            checkpoints.save(folder / "tensors", state, step=step, nonce="bench", world_size=2)
            group = checkpoints.WriterGroup(nonce="bench", rank=1, size=2)
            handle = engine.save_async(state, step=step, world=group)
            note(f"{case}: pause of the one that commits", "elastic", _longest_pause(handle), "s")
    shutil.rmtree(folder / "tensors")


def _save_beside(
    case: str,
    subject: str,
    copy: Callable[[], object],
    engine: checkpoints.Engine,
    state: object,
    step: int,
    note: Note,
) -> None:
    """A save, and the same bytes copied just before."""
    copy_s = _cpu_s(copy)
    handles: list[checkpoints.SaveHandle] = []
    save = functools.partial(engine.save_async, state, step=step, world=_world())
    stall_s = _cpu_s(lambda: handles.append(save()))
    pause_s = _longest_pause(handles[0])
    outcome = handles[0].outcome
    assert outcome is not None
    note(f"{case}: stall", subject, copy_s, "s")
    note(f"{case}: stall", "elastic", stall_s, "s")
    note(f"{case}: stall / {subject}", "elastic", stall_s / copy_s, "x")
    note(f"{case}: pause", "elastic", pause_s, "s")
    note(f"{case}: write", "elastic", outcome.write_s, "s")


def _cpu_s(call: Callable[[], object]) -> float:
    began_s = time.thread_time()
    call()
    return time.thread_time() - began_s


def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _clone(sources: list[torch.Tensor]) -> None:
    clones = [source.clone() for source in sources]
    del clones


def many_checkpoints(folder: Path, note: Note) -> None:
    """The CPU time of a save, with a policy that asks for all manifests, while the folder fills."""
    state = {"loss": 1.0, **{f"layers.{i}": torch.ones(8) for i in range(1000)}}
    keep = checkpoints.LatestN(CHECKPOINTS) | checkpoints.BestN(1, "loss")
    for subject, root in (("one process", folder / "one"), ("a process for each", folder / "each")):
        engine: checkpoints.Engine | None = None
        for step in range(1, CHECKPOINTS + 1):
            if subject != "one process":
                retention._READ.clear()  # nothing is known of the checkpoints
            began_s = time.process_time()
            engine = engine or checkpoints.Engine(root, keep=keep)
            outcome = engine.save_async(state, step=step, world=_world()).wait()
            assert outcome is not None and outcome.status is checkpoints.SaveStatus.COMMITTED
            if subject != "one process":
                engine.close()
                engine = None
            took_s = time.process_time() - began_s
            if 1 < step <= 11 or step > CHECKPOINTS - 10:
                count = "1 to 10" if step <= 11 else f"{CHECKPOINTS - 10} to {CHECKPOINTS - 1}"
                note(f"CPU of a save beside {count} checkpoints", subject, took_s, "s")
        if engine is not None:
            engine.close()
        shutil.rmtree(root)


def slow_storage(folder: Path, note: Note) -> None:
    """Stall and pause while a storage takes 10 MB/s."""
    state = {f"tensor{i}": torch.randn(SLOW_STATE_BYTES // 32) for i in range(8)}
    source = torch.cat([tensor.view(torch.uint8) for tensor in state.values()])
    copies = [torch.ones_like(source) for _ in range(2)]
    with checkpoints.Engine(_Slow(folder / "slow-storage")) as engine:
        engine.reserve(state)
        for step in range(1, SAVES + 1):
            copy = functools.partial(copies[step % 2].copy_, source)
            _save_beside("10 MB/s", "memcpy", copy, engine, state, step, note)
            note("10 MB/s: write", "raw", source.numel() / SLOW_BYTES_PER_S, "s")
    shutil.rmtree(folder / "slow-storage")


def _world() -> checkpoints.WriterGroup:
    return checkpoints.WriterGroup(nonce="bench")


def _longest_pause(handle: checkpoints.SaveHandle) -> float:
    """The longest pause of this thread until the checkpoint is committed."""
    longest_s, last_s, last_cpu_s = 0.0, time.perf_counter(), time.process_time()
    while not handle.ended.is_set():
        time.sleep(0.001)
        now_s, cpu_s = time.perf_counter(), time.process_time()
        longest_s = max(longest_s, min(now_s - last_s, cpu_s - last_cpu_s))
        last_s, last_cpu_s = now_s, cpu_s
    outcome = handle.wait()
    assert outcome is not None and outcome.status is checkpoints.SaveStatus.COMMITTED
    return longest_s


class _Slow(LocalStorage):
    """A folder whose files take 10 MB/s."""

    def create(self, path: str) -> WritableFile:
        return _SlowFile(super().create(path))


class _SlowFile:
    def __init__(self, inner: WritableFile) -> None:
        self._inner = inner
        self.sync, self.close = inner.sync, inner.close

    def write(self, data: bytes | memoryview) -> None:
        time.sleep(memoryview(data).nbytes / SLOW_BYTES_PER_S)
        self._inner.write(data)


if __name__ == "__main__":
    main()
