"""What a save costs training, and how close writing and loading come to the raw bytes.

All subjects handle the same bytes in one run, interleaved, on one folder (by default a tmpfs).
Ranks of W > 1 run one after the other in one process: it measures work, not contention. Ratios
are taken within a round, so that a noisy moment hits both sides.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch
from measurement import Report, Row
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import checkpoints

TENSORS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--folder", default="/dev/shm")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch.distributed")
    torch.manual_seed(args.seed)
    count = args.mib * (1 << 20) // 4 // TENSORS
    state = {f"tensor{i}": torch.randn(count) for i in range(TENSORS)}
    bench = Bench(state)
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            for world_size in args.worlds:
                bench.stall(Path(folder), world_size)
            bench.peers(Path(folder))
            bench.slow_down(Path(folder))
    report = Report("checkpoint", args.seed, bench.rows())
    print(report.to_json()) if args.json else report.print_table()


class Bench:
    """Measures; samples by (case, subject, unit)."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self._state = state
        self._size = sum(t.numel() * t.element_size() for t in state.values())
        self._host = torch.ones(self._size, dtype=torch.uint8)
        self._samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)

    def rows(self) -> tuple[Row, ...]:
        return tuple(Row(*key, tuple(found)) for key, found in self._samples.items())

    def note(self, case: str, subject: str, value: float, unit: str = "s") -> None:
        self._samples[case, subject, unit].append(value)

    def stall(self, folder: Path, world_size: int) -> None:
        """Rank 0's stall against memcpy of 1/W, its write against a raw one of as many bytes."""
        share = self._size // world_size
        root = folder / f"w{world_size}"
        source = torch.ones(share, dtype=torch.uint8)  # zeros would all be one page
        raw = statistics.median(timed(lambda: self._host[:share].copy_(source)) for _ in range(3))
        engine = checkpoints.Engine(root, keep=checkpoints.LatestN(1))
        engine.reserve(self._state, world_size=world_size)
        world = checkpoints.World(nonce="bench", size=world_size)
        handle = engine.save_async(self._state, step=1, world=world)
        if world_size == 1:
            outcome = handle.wait()
            assert outcome is not None and not outcome.error, outcome
            raw_write = timed(lambda: self._raw_write(folder / "raw"))
            self.note("write", "raw", raw_write)
            self.note("write", "elastic", outcome.write_s)
            self.note("write / raw", "elastic", outcome.write_s / raw_write, "x")
        else:
            engine.close(timeout_s=0.0)  # the other ranks are not there
            outcome = handle.wait()
            assert outcome is not None
        engine.close()
        case = f"stall W={world_size}"
        self.note(case, "memcpy of 1/W", raw)
        self.note(case, "elastic", outcome.stall_s)
        self.note(f"{case} / memcpy", "elastic", outcome.stall_s / raw, "x")
        if world_size > 1:
            shutil.rmtree(root, ignore_errors=True)

    def peers(self, folder: Path) -> None:
        """Writing and loading by others, and loading by us, against raw bytes."""
        state, raw = self._state, folder / "raw"
        raw_write = timed(lambda: self._raw_write(raw))
        into = {name: torch.ones_like(tensor) for name, tensor in state.items()}
        raw_read = timed(lambda: self._raw_read(raw))
        self.note("load", "raw", raw_read)
        newest = checkpoints.latest(folder / "w1").checkpoint
        assert newest is not None
        self._load(
            "elastic", lambda: checkpoints.load(folder / "w1", newest.name, into=into), raw_read
        )
        shutil.rmtree(folder / "w1")
        cases: tuple[tuple[str, Callable[[Path], object], Callable[[Path], object]], ...] = (
            ("torch.save", lambda p: torch.save(state, p), lambda p: torch.load(p)),
            (
                "safetensors",
                lambda p: save_file(state, p),
                lambda p: {k: v.clone() for k, v in load_file(p).items()},
            ),
            (
                "DCP",
                lambda p: dcp_save(dict(state), checkpoint_id=p, no_dist=True),
                lambda p: dcp_load(dict(into), checkpoint_id=p, no_dist=True),
            ),
        )
        for subject, write, load in cases:
            path = folder / subject
            took = timed(lambda w=write, p=path: durably(w, p))  # type: ignore[misc]
            self.note("write", subject, took)
            self.note("write / raw", subject, took / raw_write, "x")
            self._load(subject, lambda r=load, p=path: r(p), raw_read)  # type: ignore[misc]
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._dcp_async(folder / "async", raw_write)
        raw.unlink()

    def _load(self, subject: str, load: Callable[[], object], raw_read: float) -> None:
        took = timed(load)
        self.note("load", subject, took)
        self.note("load / raw", subject, took / raw_read, "x")

    def _dcp_async(self, path: Path, raw_write: float) -> None:
        began = time.perf_counter()
        future = dcp_async_save(dict(self._state), checkpoint_id=path, no_dist=True)
        self.note("stall W=1", "DCP async", time.perf_counter() - began)
        upload = future if isinstance(future, Future) else future.upload_completion
        upload.result()
        took = time.perf_counter() - began
        self.note("write", "DCP async", took)
        self.note("write / raw", "DCP async", took / raw_write, "x")
        shutil.rmtree(path)

    def slow_down(self, folder: Path) -> None:
        """A training step's time while a save is written, against alone."""
        work = torch.randn(512, 512)

        def step() -> None:
            for _ in range(20):
                work @ work

        alone = statistics.median(timed(step) for _ in range(30))
        with checkpoints.Engine(folder / "slow") as engine:
            engine.reserve(self._state)
            handle = engine.save_async(self._state, step=1, world=checkpoints.World(nonce="b"))
            beside = []
            while handle.outcome is None:
                beside.append(timed(step))
        shutil.rmtree(folder / "slow")
        slower = 100 * (statistics.median(beside or [alone]) / alone - 1)
        self.note("training slowed while writing", "elastic", slower, "%")

    def _raw_write(self, path: Path) -> None:
        with open(path, "wb", buffering=0) as file:
            view = self._host.numpy().data
            for begin in range(0, self._size, 16 << 20):
                file.write(view[begin : begin + (16 << 20)])
            os.fsync(file.fileno())

    def _raw_read(self, path: Path) -> None:
        with open(path, "rb", buffering=0) as file:
            view = self._host.numpy().data
            for begin in range(0, self._size, 16 << 20):
                file.readinto(view[begin : begin + (16 << 20)])


def durably(write: Callable[[Path], object], path: Path) -> None:
    write(path)
    sync(path)


def sync(path: Path) -> None:
    """What is compared has to be durable on both sides."""
    for file in path.rglob("*") if path.is_dir() else (path,):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
