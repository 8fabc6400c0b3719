"""What a save costs training, and how close writing and loading come to the raw bytes.

All subjects handle the same bytes in one run, interleaved, on one folder (by default a tmpfs; a
disk is measured besides, with its range). Ratios are taken to the raw bytes handled just before,
so that a noisy moment hits both sides. The ranks of W > 1 write one after the other, in one
process: it measures work, not contention for this machine. They load together in W processes with
a gloo group; in turn with it the same processes each read the raw bytes at once.

On a virtual machine a page that its host has to find first costs several times what is to be
measured. So before a write, or a load into new memory, as many bytes are written and given back
(but not before a stall is measured: it slows down the next copy), and the first of several loads
by the same processes does not count.

``make bench`` runs it in full: 1 GiB, three rounds, 1,000 kills: about 30 minutes on two cores.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import torch
from checkpoint_ranks import bad_after_kills, load_together
from checkpoint_scale import many_checkpoints, many_tensors, slow_storage
from measurement import Report, Row, timed
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import checkpoints
from elastic.testing.reaper import reap_descendants

TENSORS = 32
SETTLE_S = 0.5  # after a save, in which the one before it is removed
STALLS, WRITES, LOADS = 7, 5, 5  # saves, saves and loads of one kind, in each round
DISK = 4  # saves, and loads, in each round
SAVES = 5  # while training
ALONE = 60  # steps without a save, before one and after it
NICENESS = 10  # the engine's
SIZES = {"small": (64, 50), "full": (1024, 1000)}  # MiB, kills


def main() -> None:
    reap_descendants()
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--mib", type=int, help="of state, instead of the size's")
    parser.add_argument("--kills", type=int, help="instead of the size's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale-rounds", type=int, default=1, help="of checkpoint_scale.py")
    parser.add_argument("--worlds", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--folder", default="/dev/shm", help="a memory file system")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="a folder on a disk")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch.distributed")
    torch.manual_seed(args.seed)
    mib, kills = SIZES[args.size]
    kills = kills if args.kills is None else args.kills
    with folder_in(args.folder) as folder:  # first: a large process takes long to fork
        bad = bad_after_kills(folder / "killed", kills, args.seed)
    count = (args.mib or mib) * (1 << 20) // 4 // TENSORS
    bench = Bench({f"tensor{i}": torch.randn(count) for i in range(TENSORS)}, args.folder)
    for _ in range(args.rounds):
        with folder_in(args.folder) as folder:
            bench.save_and_load(folder, args.worlds)
            bench.peers(folder, args.worlds)
            bench.slow_down(folder)
        with folder_in(args.disk) as folder:
            bench.disk(folder)
    for _ in range(args.scale_rounds):
        with folder_in(args.folder) as folder:
            many_tensors(folder, bench.note)
            many_checkpoints(folder, bench.note)
            slow_storage(folder, bench.note)
    if kills:
        bench.note("unloadable or mixed after a kill", "elastic", bad, f"of {kills}")
    Report("checkpoint", args.seed, bench.rows()).show(as_json=args.json)


class Bench:
    """Measures; samples by (case, subject, unit)."""

    def __init__(self, state: dict[str, torch.Tensor], memory: str) -> None:
        self._state = state
        self._memory = memory  # a folder in it
        self._size = sum(t.numel() * t.element_size() for t in state.values())
        self._host = torch.ones(self._size, dtype=torch.uint8)  # zeros would all be one page
        self._source = torch.cat([t.view(torch.uint8) for t in state.values()])
        self._live = {name: torch.ones_like(tensor) for name, tensor in state.items()}
        self._samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)

    def rows(self) -> tuple[Row, ...]:
        return tuple(Row(*key, tuple(found)) for key, found in self._samples.items())

    def note(self, case: str, subject: str, value: float, unit: str = "s") -> None:
        self._samples[case, subject, unit].append(value)

    def against(self, case: str, subject: str, value_s: float, raw: str, raw_s: float) -> None:
        """Seconds, and their ratio to the raw bytes of the same round."""
        self.note(case, subject, value_s)
        self.note(f"{case} / {raw}", subject, value_s / raw_s, "x")

    # --- ours

    def save_and_load(self, folder: Path, worlds: list[int]) -> None:
        for world_size in worlds:
            root = folder / f"w{world_size}"
            self._save(root, folder / "raw", world_size)
            self._timed_raw_write(folder / "raw", 1)  # complete again, for the raw readers
            if world_size == 1:
                self._load_alone(root, folder / "raw")
            else:
                subjects = {"elastic": root, "elastic, other hosts": root}
                self._load_together(world_size, folder / "raw", subjects)
            shutil.rmtree(root)

    def _load_together(self, size: int, raw: Path, subjects: dict[str, Path]) -> None:
        """By ``size`` processes, each time just after they have only read as many bytes."""
        case = f"load W={size}"
        for found in load_together(raw.parent, size, self._state, raw, subjects, LOADS):
            subject, raw_s, took_s = found
            self.note(case, "raw read", raw_s)
            self.against(case, subject, took_s, "raw", raw_s)

    def _save(self, root: Path, raw: Path, size: int) -> None:
        """Each stall against a memcpy of 1/W just before it, each write against a raw one of as
        much.

        memcpy has as much memory to go round in as the engines: two buffers for each rank.
        """
        share = self._size // size
        engines, copies = [], []
        for rank in range(size):
            engines.append(checkpoints.Engine(root, keep=checkpoints.LatestN(1)))
            engines[-1].reserve(self._state, rank=rank, world_size=size)
            source = self._source[rank * share : (rank + 1) * share]
            copies.append([(torch.ones(share, dtype=torch.uint8), source) for _ in range(2)])
        for step in range(1, STALLS + WRITES + 1):
            raws_s, handles = [], []
            for rank, engine in enumerate(engines):
                if step > STALLS:
                    raws_s.append(self._timed_raw_write(raw, size))
                    self._make_ready(share)
                else:
                    into, source = copies[rank][step % 2]
                    raws_s.append(timed(functools.partial(into.copy_, source)))
                world = checkpoints.WriterGroup(nonce="bench", rank=rank, size=size)
                handle = engine.save_async(self._state, step=step, world=world)
                while not handle.is_written:
                    time.sleep(0.01)
                handles.append(handle)
            for raw_s, handle in zip(raws_s, handles, strict=True):
                outcome = handle.wait()
                assert outcome is not None and outcome.status is checkpoints.SaveStatus.COMMITTED, (
                    outcome
                )
                if step > STALLS:
                    self.note(f"write W={size}", "raw", raw_s)
                    self.against(f"write W={size}", "elastic", outcome.write_s, "raw", raw_s)
                else:
                    self.note(f"stall W={size}", "memcpy of 1/W", raw_s)
                    self.against(f"stall W={size}", "elastic", outcome.stall_s, "memcpy", raw_s)
            time.sleep(SETTLE_S)
        for engine in engines:
            engine.close()

    def _load_alone(self, root: Path, raw: Path) -> None:
        name = checkpoints.list_checkpoints(root)[0].name
        for _ in range(LOADS):
            for subject, load in (
                ("elastic", lambda: checkpoints.load(root, name, into=self._live)),
                ("elastic, verify only", lambda: checkpoints.verify(root, name)),
            ):
                raw_s = timed(lambda: self._raw_read(raw))
                self.note("load W=1", "raw read", raw_s)
                self.against("load W=1", subject, timed(load), "raw", raw_s)
        raw_s = timed(lambda: self._raw_read(raw))
        self._make_ready(self._size)
        fresh_s = timed(lambda: checkpoints.load(root, name))
        self.against("load W=1", "elastic, into fresh memory", fresh_s, "raw", raw_s)

    def slow_down(self, folder: Path) -> None:
        """A training step's time while a save is written, against without one."""
        cores = os.cpu_count() or 1
        for threads, where in ((cores - 1, "a core to spare"), (cores, "on every core")):
            torch.set_num_threads(max(threads, 1))
            self._slow_down(folder, f"training slowed while writing, {where}")
        torch.set_num_threads(cores)

    def _slow_down(self, folder: Path, case: str) -> None:
        """Each save against the same time without one, before and after; beside it what a thread
        costs that only writes the raw bytes, as low in priority."""
        with checkpoints.Engine(folder / "slow", keep=checkpoints.LatestN(1)) as engine:
            engine.reserve(self._state)
            for number in range(1, SAVES + 1):
                self._make_ready(self._size)
                save = functools.partial(self._saved, engine, number)
                took_s = self._beside(case, "elastic", save)
                self.note(f"{case}: write", "elastic", took_s)
                self._make_ready(self._size)
                took_s = self._beside(
                    case, "raw write", lambda: self._raw_writing(folder / "beside")
                )
                self.note(f"{case}: write", "raw write", took_s)
        shutil.rmtree(folder / "slow")

    def _beside(self, case: str, subject: str, begin: Callable[[], Callable[[], bool]]) -> float:
        """Note by how much steps are slower until what was begun has ended; how long it took."""
        work = torch.randn(512, 512)

        def step() -> None:
            for _ in range(4):
                work @ work

        alone = [timed(step) for _ in range(ALONE)]
        has_ended = begin()
        began, beside = time.perf_counter(), []
        while not has_ended():
            beside.append(timed(step))
        took_s = time.perf_counter() - began
        time.sleep(SETTLE_S)
        alone += [timed(step) for _ in range(ALONE)]
        slower = statistics.mean(beside) / statistics.mean(alone) - 1
        self.note(case, subject, 100 * slower, "%")
        return took_s

    def _saved(self, engine: checkpoints.Engine, step: int) -> Callable[[], bool]:
        world = checkpoints.WriterGroup(nonce="bench")
        handle = engine.save_async(self._state, step=step, world=world)
        return lambda: handle.outcome is not None

    def _raw_writing(self, path: Path) -> Callable[[], bool]:
        """A writer's thread without anything else."""

        def write() -> None:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            self._raw_write(path, self._size)

        path.unlink(missing_ok=True)
        thread = threading.Thread(target=write, name="raw-writer")
        thread.start()
        return lambda: not thread.is_alive()

    # --- others

    def peers(self, folder: Path, worlds: list[int]) -> None:
        """Writing and loading by others, each durable, as ours is."""
        state = self._state
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
                lambda p: dcp_load(dict(self._live), checkpoint_id=p, no_dist=True),
            ),
        )
        for subject, write, load in cases:
            path, raw = folder / subject, folder / "raw"
            raw_s = self._timed_raw_write(raw, 1)
            self._make_ready(self._size)
            took = timed(lambda w=write, p=path: durably(w, p))  # type: ignore[misc]
            self.against("write W=1", subject, took, "raw", raw_s)
            self._raw_read(raw)  # the first time finds its pages
            raw_s = timed(lambda r=raw: self._raw_read(r))  # type: ignore[misc]
            self._make_ready(self._size)
            took = timed(lambda r=load, p=path: r(p))  # type: ignore[misc]
            self.against("load W=1", subject, took, "raw", raw_s)
            if subject == "DCP":
                for size in worlds:
                    if size > 1:
                        self._load_together(size, raw, {subject: path})
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._dcp_async(folder / "async", folder / "raw")

    def _dcp_async(self, path: Path, raw: Path) -> None:
        raw_s = self._timed_raw_write(raw, 1)
        memcpy_s = timed(lambda: self._host.copy_(self._source))
        self._make_ready(2 * self._size)
        began = time.perf_counter()
        future = dcp_async_save(dict(self._state), checkpoint_id=path, no_dist=True)
        self.against("stall W=1", "DCP async", time.perf_counter() - began, "memcpy", memcpy_s)
        upload = future if isinstance(future, Future) else future.upload_completion
        upload.result()
        sync(path)
        took = time.perf_counter() - began
        self.against("write W=1", "DCP async", took, "raw", raw_s)
        shutil.rmtree(path)

    def disk(self, folder: Path) -> None:
        """The same on a disk, in turns, read without the kernel's copy of it."""
        with checkpoints.Engine(folder / "ours", keep=checkpoints.LatestN(1)) as engine:
            engine.reserve(self._state)
            for step in range(1, DISK + 1):
                raw_s = self._timed_raw_write(folder / "raw", 1)
                self.note("disk: write", "raw", raw_s)
                self._make_ready(self._size)
                world = checkpoints.WriterGroup(nonce="bench")
                outcome = engine.save_async(self._state, step=step, world=world).wait()
                assert outcome is not None and outcome.status is checkpoints.SaveStatus.COMMITTED, (
                    outcome
                )
                self.against("disk: write", "elastic", outcome.write_s, "raw", raw_s)
        name = checkpoints.list_checkpoints(folder / "ours")[0].name
        for _ in range(DISK):
            self._forget(folder)
            raw_s = timed(lambda: self._raw_read(folder / "raw"))
            self.note("disk: load", "raw read", raw_s)
            self._forget(folder)
            took = timed(lambda: checkpoints.load(folder / "ours", name, into=self._live))
            self.against("disk: load", "elastic", took, "raw", raw_s)

    # --- raw bytes

    def _make_ready(self, size: int) -> None:
        """Make the kernel provide free memory for so many bytes.

        Three times as many: it need not give back first what it has got last.
        """
        chunk = bytes(16 << 20)
        with tempfile.TemporaryFile(dir=self._memory, buffering=0) as file:
            for _ in range(-(-3 * size // len(chunk))):
                file.write(chunk)

    def _forget(self, folder: Path) -> None:
        """Have the kernel drop its copies of the files, so that reads reach the disk; it has
        memory for them, and for as much again."""
        for file in folder.rglob("*"):
            if file.is_file():
                descriptor = os.open(file, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
        self._make_ready(self._size)

    def _timed_raw_write(self, path: Path, size: int) -> float:
        """Into a new file: an old one's pages would be there already."""
        path.unlink(missing_ok=True)
        self._make_ready(self._size // size)
        return timed(lambda: self._raw_write(path, self._size // size))

    def _raw_write(self, path: Path, size: int) -> None:
        with open(path, "wb", buffering=0) as file:
            view = self._source[:size].numpy().data
            for begin in range(0, size, 16 << 20):
                file.write(view[begin : begin + (16 << 20)])
            os.fsync(file.fileno())

    def _raw_read(self, path: Path) -> None:
        with open(path, "rb", buffering=0) as file:
            view = self._host.numpy().data
            for begin in range(0, self._size, 16 << 20):
                file.readinto(view[begin : begin + (16 << 20)])


@contextmanager
def folder_in(place: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def durably(write: Callable[[Path], object], path: Path) -> None:
    write(path)
    sync(path)


def sync(path: Path) -> None:
    """What is compared has to be durable on both sides."""
    for file in path.rglob("*") if path.is_dir() else (path,):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


if __name__ == "__main__":
    main()
