"""What torch's own ``dist._reconfigure`` would save of a recovery (docs/decisions/0025).

    python benchmarks/reconfigure.py --json > benchmarks/results/reconfigure.json

Needs torch 2.14 or newer: ``make compat`` has environments with it. Three ranks on gloo take turns
within one run: rebuild the group as the harness does (destroy it, make another one under a new
prefix of the store), or give the same group new handles by ``_reconfigure``. Each sample is one
rank's time from a common start until its first all-reduce in the new group has ended.

Then one rank is stopped (SIGSTOP) while the others wait for it in an all-reduce, and they
reconfigure to a group of two. ``released``: whether a rank got its all-reduce back within ten
seconds.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measurement import Report, Row
from torch import multiprocessing
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from elastic.testing.reaper import reap_descendants

RANKS = 3
RELEASED_WITHIN_S = 10.0
REBUILD, RECONFIGURE = "destroy and init_process_group", "_reconfigure"


def main() -> None:
    reap_descendants()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turns", type=int, default=10, help="of each way in a round")
    args = parser.parse_args()
    if not hasattr(dist, "_reconfigure"):
        parser.error(f"torch {torch.__version__} has no _reconfigure: use 2.14 or newer")
    os.environ["OMP_NUM_THREADS"] = "1"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    ranks = [
        context.Process(target=_measure, args=(rank, store.port, args, found), daemon=True)
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    try:
        for _ in ranks:
            _add(samples, found.get())
        os.kill(int(ranks[-1].pid or 0), signal.SIGSTOP)
        store.set("stopped", "1")
        for _ in ranks[:-1]:
            _add(samples, found.get())
    finally:
        for process in ranks:
            process.kill()
            process.join()
    rows = tuple(Row(*key, tuple(values)) for key, values in samples.items())
    Report("reconfigure", 0, rows).show(as_json=args.json)


def _add(samples: dict[tuple[str, str, str], list[float]], more: Any) -> None:
    for key, values in more.items():
        samples[key].extend(values)


def _measure(rank: int, port: int, args: argparse.Namespace, found) -> None:  # type: ignore[no-untyped-def]
    at = _Rank(rank, port)
    samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)

    def add(subject: str, turn: Callable[[], None]) -> None:
        samples["until the first all-reduce", subject, "ms"].append(at.time_ms(turn))

    for number in range(args.rounds):
        at.make("first of a round")
        for _ in range(args.turns):
            add(REBUILD, at.rebuild)
        dist.destroy_process_group()
        at.make("to be reconfigured", enable_reconfigure=True)
        for _ in range(args.turns):
            add(RECONFIGURE, lambda: at.reconfigure(RANKS))
        if number < args.rounds - 1:
            dist.destroy_process_group()
    found.put(dict(samples))
    at.store.wait(["stopped"])
    if rank < RANKS - 1:  # the last one is stopped, or comes too late
        found.put(at.shrink())
    time.sleep(3600)  # until main has everything


class _Rank:
    """One of the processes that take turns."""

    def __init__(self, rank: int, port: int) -> None:
        torch.set_num_threads(1)
        patience = datetime.timedelta(seconds=300)
        self.store = TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
        self._rank = rank
        self._number = 0  # of groups, and of handles

    def time_ms(self, turn: Callable[[], None]) -> float:
        self._meet()
        began_s = time.perf_counter()
        turn()
        self._sum(RANKS)
        return 1000 * (time.perf_counter() - began_s)

    def make(self, what: str, **more: Any) -> None:
        self._number += 1
        store = PrefixStore(f"{what} {self._number}", self.store)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=RANKS, **more)

    def rebuild(self) -> None:
        dist.destroy_process_group()
        self.make("rebuilt")

    def reconfigure(self, size: int) -> None:
        self._number += 1
        key = f"handles/{self._number}"
        self.store.set(f"{key}/{self._rank}", dist._get_reconfigure_handle())  # type: ignore[attr-defined]
        handles = [self.store.get(f"{key}/{rank}").decode() for rank in range(size)]
        dist._reconfigure(uuid=self._number, handles=handles).wait()  # type: ignore[attr-defined]

    def shrink(self) -> dict[tuple[str, str, str], list[float]]:
        """The last rank is stopped: what becomes of work that waits for it."""
        blocked = dist.all_reduce(torch.ones(4), async_op=True)
        assert blocked is not None
        began_s = time.perf_counter()
        self.reconfigure(RANKS - 1)
        self._sum(RANKS - 1)
        took_ms = 1000 * (time.perf_counter() - began_s)
        while not blocked.is_completed() and time.perf_counter() < began_s + RELEASED_WITHIN_S:
            time.sleep(0.05)
        return {
            ("a peer is stopped: until the first all-reduce of two", RECONFIGURE, "ms"): [took_ms],
            ("a peer is stopped: blocked all-reduce released", RECONFIGURE, "of 1"): [
                float(blocked.is_completed())
            ],
        }

    def _meet(self) -> None:
        self._number += 1
        if self.store.add(f"arrived/{self._number}", 1) == RANKS:
            self.store.set(f"met/{self._number}", "1")
        self.store.wait([f"met/{self._number}"])

    def _sum(self, size: int) -> None:
        ones = torch.ones(4)
        dist.all_reduce(ones)
        assert float(ones[0]) == size


if __name__ == "__main__":
    main()
