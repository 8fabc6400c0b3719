"""The cost of a process group in Python, registered with c10d (docs/decisions/0027).

    python benchmarks/registered_group.py --json > benchmarks/results/registered_group.json

Ranks on gloo take turns within one run, with a new group in each turn: torch's group alone; the
harness, whose group is torch's and whose waits an abort can end (``elastic.groups``); and
:class:`RegisteredGroup`, a ``ProcessGroup`` in Python that passes each collective on to gloo and
returns its own ``Work``. Measured are synchronous all-reduces, as a script calls them, and
the forward and backward pass of a model under DDP. Medians are to be compared; on a machine with
fewer cores than ranks the rest shows how the kernel scheduled them.

The registered group comes in variants. A wait for a collective is released by an abort if it is
notified of the end by gloo's callback (as the harness waits for collectives of a script), or if it
waits inside gloo in slices (as the harness waits for gradients). And DDP's reducer waits for
futures, not for works: gloo's cannot be released, and one made in Python can.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measurement import Report, Row
from torch import multiprocessing, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from elastic.groups.group import ProcessGroup
from elastic.groups.pending import pending_works
from elastic.link.link import GroupSpec
from elastic.train.ddp import ElasticDDP
from elastic.wire.handshake import SecretKey

ALONE, OURS = "torch alone", "elastic.groups"
CALLBACK, SLICES = "registered, waits by a callback", "registered, waits in slices"
GLOOS_FUTURE, OWN_FUTURE = "registered, gloo's futures", "registered, futures of its own"
BUCKET_MB = 1
SIZES = {"all_reduce of 4 B": 1, "all_reduce of 1 MB": 1 << 18}
DDP_CASE = "DDP, forward and backward"
WARM_UP = 10
NO_TIMEOUT = datetime.timedelta(0)
Samples = dict[tuple[str, ...], list[float]]


class RegisteredWork(dist.Work):
    """A collective of gloo's whose end an abort can bring about."""

    in_slices = True
    has_own_future = False

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: datetime.timedelta = NO_TIMEOUT) -> bool:
        if self.in_slices:
            pending_works().finish_one(self._work)
        else:
            pending_works().wait(self._work)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> Any:
        of_gloo = self._work.get_future()
        if not self.has_own_future:
            return of_gloo
        own: torch.futures.Future[Any] = torch.futures.Future()

        def done(error: BaseException | None) -> None:
            if error is None:
                own.set_result(of_gloo.value())
            else:
                own.set_exception(error)

        pending_works().start(self._work, done)
        return own


class RegisteredGroup(dist.ProcessGroup):
    """Passes on to gloo what this benchmark and DDP ask for."""

    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    def getBackendName(self) -> str:
        return "registered"

    def allreduce(self, tensors: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        return RegisteredWork(self._gloo.allreduce(tensors, opts))

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        return RegisteredWork(self._gloo.broadcast(tensors, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> dist.Work:  # type: ignore[override]
        return RegisteredWork(self._gloo.allgather(outputs, inputs, opts))

    def shutdown(self) -> None:
        self._gloo.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turns", type=int, default=40, help="collectives of a size in a round")
    parser.add_argument("--passes", type=int, default=20, help="of DDP in a round")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ports = [_free_port() for _ in range(2 * args.rounds)]
    samples: Samples = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(  # type: ignore[attr-defined,no-untyped-call]
            _measure, args=(store.port, ports, folder, args), nprocs=args.ranks, join=True
        )
        for found in Path(folder).iterdir():
            for *key, values in json.loads(found.read_text()):
                samples[tuple(key)].extend(values)
    rows = tuple(Row(key[0], key[1], key[2], tuple(values)) for key, values in samples.items())
    Report("registered_group", 0, rows).show(as_json=args.json)


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def _measure(rank: int, port: int, ports: list[int], folder: str, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.Backend.register_backend("registered", RegisteredGroup, devices=["cpu"])
    at = _Rank(rank, args.ranks, port, ports)
    samples: Samples = defaultdict(list)
    registered = partial(at.torchs, "registered")
    for _ in range(args.rounds):
        collectives: dict[str, Callable[[], AbstractContextManager[object]]] = {
            ALONE: at.torchs,
            OURS: at.ours,
            CALLBACK: partial(registered, in_slices=False),
            SLICES: registered,
        }
        for subject, group in collectives.items():
            with group():
                for case, count in SIZES.items():
                    tensor = torch.ones(count)
                    act = partial(dist.all_reduce, tensor.zero_())
                    samples[case, subject, "ms"] += timed_ms(act, args.turns)
        passes: dict[str, Callable[[], AbstractContextManager[object]]] = {
            ALONE: at.torchs,
            OURS: at.ours,
            GLOOS_FUTURE: registered,
            OWN_FUTURE: partial(registered, has_own_future=True),
        }
        for subject, group in passes.items():
            with group(), _model(is_ours=subject == OURS) as step:
                samples[DDP_CASE, subject, "ms"] += timed_ms(step, args.passes)
    rows = [[*key, values] for key, values in samples.items()]
    Path(folder, str(rank)).write_text(json.dumps(rows))


def timed_ms(act: Callable[[], object], turns: int) -> list[float]:
    took = []
    for _ in range(WARM_UP + turns):
        began_s = time.perf_counter()
        act()
        took.append(1000 * (time.perf_counter() - began_s))
    return took[WARM_UP:]


class _Rank:
    """One of the processes, and the groups that it makes."""

    def __init__(self, rank: int, size: int, port: int, ports: list[int]) -> None:
        patience = datetime.timedelta(seconds=300)
        self._store = TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
        self._rank, self._size = rank, size
        self._ports = iter(ports)
        self._number = 0

    @contextmanager
    def torchs(
        self, backend: str = "gloo", *, in_slices: bool = True, has_own_future: bool = False
    ) -> Iterator[None]:
        self._number += 1
        RegisteredWork.in_slices, RegisteredWork.has_own_future = in_slices, has_own_future
        store = PrefixStore(str(self._number), self._store)
        dist.init_process_group(backend, store=store, rank=self._rank, world_size=self._size)
        yield
        dist.barrier() if backend == "gloo" else dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()

    @contextmanager
    def ours(self) -> Iterator[None]:
        self._number += 1
        group = ProcessGroup(torch.device("cpu"), "gloo")
        spec = GroupSpec(
            generation=self._number,
            nonce=str(self._number),
            rank=self._rank,
            size=self._size,
            store_host="127.0.0.1",
            store_port=next(self._ports),
            store_key=SecretKey(bytes(32)).text,
        )
        group.build(spec, superseded=lambda: False, timeout_s=60.0)
        yield
        dist.barrier()
        group.destroy()


@contextmanager
def _model(*, is_ours: bool) -> Iterator[Callable[[], None]]:
    """One pass of a model of 1.7 million parameters."""
    torch.manual_seed(1)
    hidden = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    module = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), *hidden, nn.Linear(512, 10))
    batch = torch.randn(16, 256)
    if is_ours:
        ours = ElasticDDP(module, bucket_cap_mb=BUCKET_MB)
        ours.enter_world()
        model: nn.Module = ours
    else:
        model = DistributedDataParallel(
            module, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB
        )

    def step() -> None:
        if is_ours:
            ours.reduction.begin(1 / dist.get_world_size())
        model(batch).square().mean().backward()

    yield step
    if is_ours:
        ours.leave_world()


if __name__ == "__main__":
    main()
