"""The cost of agreeing on a save: control flags in the gradient bucket, compared with a collective.

Two ranks on gloo train one bucket of gradients; three ways take turns within one run, so that a
noisy moment hits all of them: no agreement, control flags in the first bucket, and an
all-reduce of three numbers follows every step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict

import torch
import torch.distributed as dist
from measurement import Report, Row
from torch import multiprocessing, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from elastic.testing.reaper import reap_descendants
from elastic.train.ddp import ElasticDDP
from elastic.train.order import ControlFlags, StepFlags, ask

WAYS = ("nothing", "words", "all-reduce")


def main() -> None:
    reap_descendants()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kib", type=int, nargs="*", default=[16, 1024, 16384])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    found = context.SimpleQueue()
    ranks = [
        context.Process(target=_train, args=(rank, store.port, args, found)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    rows = tuple(
        Row(case, subject, unit, tuple(samples))
        for (case, subject, unit), samples in found.get().items()
    )
    for process in ranks:
        process.join()
    Report("agreement", args.seed, rows).show(as_json=args.json)


def _train(rank: int, port: int, args: argparse.Namespace, found) -> None:  # type: ignore[no-untyped-def]
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for kib in args.kib:
        steps = {way: _Training(kib, way) for way in WAYS}
        for _ in range(args.rounds):
            took = {way: steps[way].time_ms(args.steps) for way in WAYS}
            for way in WAYS:
                samples[f"step, {kib} KiB of gradients", way, "ms"].append(took[way])
            for way in WAYS[1:]:
                more = 1000 * (took[way] - took["nothing"])
                samples[f"cost, {kib} KiB of gradients", way, "us"].append(more)
    if rank == 0:
        found.put(dict(samples))
    dist.barrier()
    dist.destroy_process_group()


class _Training:
    """A model whose gradients fill one bucket, and one way to agree."""

    def __init__(self, kib: int, way: str) -> None:
        self._way = way
        self._model = ElasticDDP(nn.Linear(64, kib * 4, bias=False))
        self._model.enter_world()
        self._words = ControlFlags()
        self._model.reduction.flags = self._words if way == "words" else None
        self._x = torch.randn(1, 64)

    def time_ms(self, count: int) -> float:
        took = []
        for _ in range(count):
            began = time.perf_counter()
            self._words.send(StepFlags())
            self._model.reduction.begin(0.5)
            self._model(self._x).sum().backward()
            if self._way == "words":
                assert self._words.received() == StepFlags()
            elif self._way == "all-reduce":
                ask(StepFlags())
            took.append(1000 * (time.perf_counter() - began))
        return statistics.median(took)


if __name__ == "__main__":
    main()
