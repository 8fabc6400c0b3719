"""One rank of the doctor's collectives."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import torch
import torch.distributed as dist

from elastic.doctor.checks import die_with_parent, has_gpu_driver
from elastic.errors import SYSTEM_CLOCK

# A message size whose round trip takes longer ends the series of measurements.
DOCTOR_SLOW_ROUND_TRIP_S = 2.0
# The raw TCP stream between two ranks, for the comparison with torch: both are about to connect.
DOCTOR_RAW_CONNECT_S = 10.0

# ----------------------------------------------------------------------------
# The speed of messages of each size, through torch and through a plain TCP stream.
#
# Rank 0 and one other rank at a time send a message back and forth; the others wait.

SIZES = (4, 256, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
_MAX_ROUNDS, _BYTES_EACH = 30, 8 << 20


def rounds_of(size: int) -> int:
    """The number of round trips of a size.

    >>> rounds_of(4), rounds_of(64 << 20)
    (30, 2)
    """
    return max(2, min(_MAX_ROUNDS, _BYTES_EACH // size))


def measure(
    rank: int, size: int, device: str, address: str, entered: Callable[[int | None], None]
) -> Iterator[dict[str, Any]]:
    """Rank 0's measurements, one per peer and size; other ranks return none.

    ``torch_ms`` and ``raw_ms`` are one way: half of the fastest round trip.
    """
    for peer in range(1, size):
        if rank in (0, peer):
            entered(peer if rank == 0 else 0)
            yield from _pair(rank, peer, device, address)
        dist.barrier()


def _pair(rank: int, peer: int, device: str, address: str) -> Iterator[dict[str, Any]]:
    with contextlib.closing(_stream(rank, peer, device, address)) as stream:
        for size in SIZES:
            message = torch.zeros(size, dtype=torch.uint8, device=device)
            buffer = bytearray(size)
            raw_s = min(_raw_round(rank, stream, buffer) for _ in range(rounds_of(size)))
            torch_s = min(_torch_round(rank, peer, message) for _ in range(rounds_of(size)))
            if rank == 0:
                yield {
                    "peer": peer,
                    "size": size,
                    "torch_ms": 500 * torch_s,
                    "raw_ms": 500 * raw_s,
                }
            is_fast = max(torch_s, raw_s) < DOCTOR_SLOW_ROUND_TRIP_S
            if not _agree(rank, peer, device, is_fast):
                return


def _raw_round(rank: int, stream: socket.socket, buffer: bytearray) -> float:
    began = SYSTEM_CLOCK.monotonic()
    if rank == 0:
        stream.sendall(buffer)
        _receive(stream, buffer)
    else:
        _receive(stream, buffer)
        stream.sendall(buffer)
    return SYSTEM_CLOCK.monotonic() - began


def _torch_round(rank: int, peer: int, message: torch.Tensor) -> float:
    began = SYSTEM_CLOCK.monotonic()
    if rank == 0:
        dist.send(message, peer)
        dist.recv(message, peer)
    else:
        dist.recv(message, 0)
        dist.send(message, 0)
    if message.is_cuda:
        torch.cuda.synchronize()
    return SYSTEM_CLOCK.monotonic() - began


def _receive(stream: socket.socket, buffer: bytearray) -> None:
    view = memoryview(buffer)
    while view:
        received = stream.recv_into(view)
        if not received:
            raise ConnectionResetError("the peer closed the plain TCP stream")
        view = view[received:]


def _stream(rank: int, peer: int, device: str, address: str) -> socket.socket:
    """A connection between the two ranks, to the address of rank 0's node."""
    if rank == 0:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.settimeout(DOCTOR_RAW_CONNECT_S)
            listener.bind((address, 0))
            listener.listen()
            _send(peer, device, int(listener.getsockname()[1]))
            stream, _ = listener.accept()
    else:
        stream = socket.create_connection((address, _recv(device)), timeout=DOCTOR_RAW_CONNECT_S)
    stream.settimeout(DOCTOR_RAW_CONNECT_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return stream


def _agree(rank: int, peer: int, device: str, continues: bool) -> bool:
    """Whether both continue; rank 0 decides."""
    if rank == 0:
        _send(peer, device, int(continues))
        return continues
    return bool(_recv(device))


def _send(peer: int, device: str, number: int) -> None:
    dist.send(torch.tensor([number], device=device), peer)


def _recv(device: str) -> int:
    number = torch.tensor([0], device=device)
    dist.recv(number, 0)
    return int(number.item())


# ----------------------------------------------------------------------------
# One rank: runs the groups of operations named on stdin, and reports as JSON on stdout.
#
# It may hang in any operation, so it reports each one that it enters, and its parent kills it. Run
# as ``python -m elastic.doctor.rank CONFIG``.

COUNT = 1000  # elements of the tensors whose results are checked
_GPU_SIDE = 256
# The rank set by Open MPI, MPICH and Intel MPI, or Slurm, known before the group exists.
_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_UNSUPPORTED = ("not support", "not implement", "unsupported")


@dataclass(frozen=True, kw_only=True)
class Rank:
    """The context of an operation. ``entered(peer)`` reports the peer that it waits for next."""

    rank: int
    size: int
    device: str
    entered: Callable[[int | None], None]

    def tensor(self, value: float, count: int = COUNT) -> torch.Tensor:
        return torch.full((count,), float(value), device=self.device)

    @property
    def others(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]


def wrong(found: torch.Tensor, expected: float) -> str:
    """A description of the error in a result, or ""."""
    if bool((found == float(expected)).all()):
        return ""
    off = found[found != float(expected)]
    return f"{off.numel()} of {found.numel()} elements are wrong: {off[0]:g}, not {expected:g}"


def first_wrong(*sentences: str) -> str:
    return next((sentence for sentence in sentences if sentence), "")


# The operations: each returns a description of the error in its result, or ""
# ----------------------


def send_recv(me: Rank) -> str:
    """Every pair in both directions: the lower rank sends first."""
    said = []
    for peer in me.others:
        me.entered(peer)
        received = me.tensor(-1)
        if me.rank < peer:
            dist.send(me.tensor(me.rank), peer)
            dist.recv(received, peer)
        else:
            dist.recv(received, peer)
            dist.send(me.tensor(me.rank), peer)
        said.append(wrong(received, peer))
    return first_wrong(*said)


def isend_irecv(me: Rank) -> str:
    """A ring: each rank sends to the next one and receives from the previous one."""
    before, after = (me.rank - 1) % me.size, (me.rank + 1) % me.size
    me.entered(before)
    received = me.tensor(-1)
    # In one batch: on NCCL a single send may wait for its receiver.
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, me.tensor(me.rank), after),
            dist.P2POp(dist.irecv, received, before),
        ]
    )
    for work in works:
        work.wait()
    return wrong(received, before)


def broadcast(me: Rank) -> str:
    said = []
    for source in range(me.size):
        tensor = me.tensor(10 + source if me.rank == source else -1)
        dist.broadcast(tensor, source)
        said.append(wrong(tensor, 10 + source))
    return first_wrong(*said)


def reduce(me: Rank) -> str:
    tensor = me.tensor(me.rank + 1)
    dist.reduce(tensor, 0)
    return wrong(tensor, _sum_of_ranks(me)) if me.rank == 0 else ""


def all_reduce(me: Rank) -> str:
    total, largest = me.tensor(me.rank + 1), me.tensor(me.rank)
    dist.all_reduce(total)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return first_wrong(wrong(total, _sum_of_ranks(me)), wrong(largest, me.size - 1))


def all_gather(me: Rank) -> str:
    found = [me.tensor(-1) for _ in range(me.size)]
    dist.all_gather(found, me.tensor(me.rank))
    return first_wrong(*(wrong(tensor, rank) for rank, tensor in enumerate(found)))


def reduce_scatter(me: Rank) -> str:
    received = me.tensor(-1)
    dist.reduce_scatter(received, [me.tensor(part + me.rank) for part in range(me.size)])
    return wrong(received, me.size * me.rank + sum(range(me.size)))


def scatter(me: Rank) -> str:
    received = me.tensor(-1)
    parts = [me.tensor(20 + rank) for rank in range(me.size)] if me.rank == 0 else None
    dist.scatter(received, parts, src=0)
    return wrong(received, 20 + me.rank)


def gather(me: Rank) -> str:
    found = [me.tensor(-1) for _ in range(me.size)] if me.rank == 0 else None
    dist.gather(me.tensor(me.rank), found, dst=0)
    return first_wrong(*(wrong(tensor, rank) for rank, tensor in enumerate(found or [])))


def all_to_all(me: Rank) -> str:
    parts = torch.cat([me.tensor(100 * me.rank + peer) for peer in range(me.size)])
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts)
    return first_wrong(
        *(wrong(part, 100 * peer + me.rank) for peer, part in enumerate(received.chunk(me.size)))
    )


def barrier(me: Rank) -> str:
    dist.barrier()
    return ""


def own_groups(me: Rank) -> str:
    """A group of every two neighbours, and one of all ranks in reverse order."""
    said = []
    for first in range(0, me.size - 1, 2):
        group = dist.new_group([first, first + 1])
        if me.rank in (first, first + 1):
            tensor = me.tensor(me.rank)
            dist.all_reduce(tensor, group=group)
            said.append(wrong(tensor, 2 * first + 1))
            dist.destroy_process_group(group)
    everyone = dist.new_group(list(range(me.size)))
    tensor = me.tensor(1)
    dist.all_reduce(tensor, group=everyone)
    dist.destroy_process_group(everyone)
    return first_wrong(*said, wrong(tensor, me.size))


def _sum_of_ranks(me: Rank) -> float:
    return me.size * (me.size + 1) / 2


OPERATIONS: Mapping[str, Callable[[Rank], str]] = {
    "send/recv": send_recv,
    "isend/irecv": isend_irecv,
    "broadcast": broadcast,
    "reduce": reduce,
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "scatter": scatter,
    "gather": gather,
    "all_to_all": all_to_all,
    "barrier": barrier,
    "new_group": own_groups,
}


# The program ----------------------------------------------------------------------------------


class Program:
    """The main loop of a rank: one group of operations per line on stdin."""

    def __init__(self, config: Mapping[str, Any], out: TextIO) -> None:
        self._rank, self._size = int(config["rank"]), int(config["world_size"])
        self._backend = str(config["backend"])
        self._addresses: list[str] = config["addresses"]
        self._is_first = int(config["local_rank"]) == 0
        self._device = "cpu"
        self._out = out
        if self._backend == "nccl":
            local = int(config["local_rank"])
            torch.cuda.set_device(local)
            self._device = f"cuda:{local}"

    def run(self) -> None:
        """Run until stdin ends."""
        self._report(event="ready", **_build(), gpu_errors=_gpu_errors() if self._is_first else [])
        for line in sys.stdin:
            command = json.loads(line)
            self._run_group(command)
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            self._report(event="end", group=command["group"], peak_bytes=peak_bytes)

    def run_all(self) -> None:
        """Run all operations once, in a group whose ranks the launcher has set."""
        first = next(iter(OPERATIONS))
        self._report(event="ready", pid=os.getpid())
        self._report(event="entered", operation=first, peer=None)
        try:
            dist.init_process_group(self._backend)
        except Exception as error:  # noqa: BLE001 (reported)
            self._report(event="error", operation=first, text=f"initialisation: {_one_line(error)}")
            return
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        if all(self._run_one(name, operation) for name, operation in OPERATIONS.items()):
            dist.destroy_process_group()
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            self._report(event="end", group="operations", peak_bytes=peak_bytes)

    def _run_group(self, command: Mapping[str, Any]) -> None:
        """Run its operations in order; the first failure ends it, because ranks are then out of
        step."""
        methods: list[str] = command["methods"]
        is_initialisation = command["group"] == "initialisation"
        for method in methods:
            name = method.partition("://")[0] + "://"
            steps: list[tuple[str, Callable[[Rank], str]]]
            if is_initialisation:
                steps = [(f"init {name}", all_reduce)]
            elif command["group"] == "speed":
                steps = [("speed", self._measure)]
            else:
                steps = list(OPERATIONS.items())
            if not self._with_group(method, float(command["timeout_s"]), steps):
                return

    def _with_group(
        self, method: str, timeout_s: float, steps: list[tuple[str, Callable[[Rank], str]]]
    ) -> bool:
        self._report(event="entered", operation=steps[0][0], peer=None)
        try:
            self._initialise(method, timeout_s)
        except Exception as error:  # noqa: BLE001 (reported)
            self._report(
                event="error", operation=steps[0][0], text=f"initialisation: {_one_line(error)}"
            )
            return False
        is_ok = all(self._run_one(name, operation) for name, operation in steps)
        if is_ok:
            dist.destroy_process_group()
        return is_ok

    def _initialise(self, method: str, timeout_s: float) -> None:
        if method.startswith("env://"):  # env://HOST:PORT: what a launcher puts into variables
            host, _, port = method.removeprefix("env://").rpartition(":")
            os.environ.update(
                MASTER_ADDR=host.strip("[]"),
                MASTER_PORT=port,
                RANK=str(self._rank),
                WORLD_SIZE=str(self._size),
            )
            method = "env://"
        dist.init_process_group(
            self._backend,
            init_method=method,
            rank=self._rank,
            world_size=self._size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )

    def _run_one(self, name: str, operation: Callable[[Rank], str]) -> bool:
        def entered(peer: int | None) -> None:
            self._report(event="entered", operation=name, peer=peer)

        me = Rank(rank=self._rank, size=self._size, device=self._device, entered=entered)
        entered(None)
        began = SYSTEM_CLOCK.monotonic()
        try:
            is_wrong = operation(me)
            if self._device != "cpu":
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 (reported)
            text = _one_line(error)
            if any(part in text for part in _UNSUPPORTED):
                self._report(event="unsupported", operation=name, text=text)
                return True
            self._report(event="error", operation=name, text=text)
            return False
        took_ms = 1000 * (SYSTEM_CLOCK.monotonic() - began)
        self._report(event="done", operation=name, wrong=is_wrong, took_ms=took_ms)
        return True

    def _measure(self, me: Rank) -> str:
        for measured in measure(me.rank, me.size, me.device, self._addresses[0], me.entered):
            self._report(event="speed", **measured)
        return ""

    def _report(self, **message: Any) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def _build() -> dict[str, Any]:
    """Build facts of this torch, and the devices that it sees."""
    version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version  # torch has no types for it
    nccl = ".".join(map(str, version())) if dist.is_nccl_available() else ""
    return {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or ""),
        "nccl": nccl,
        "gpus": torch.cuda.device_count(),
        "has_driver": has_gpu_driver(),
        "mpi": dist.is_mpi_available(),
    }


def _gpu_errors() -> list[str]:
    """Errors of this node's devices, tested with a small matrix product on each."""
    found = []
    for device in range(torch.cuda.device_count()):
        try:
            ones = torch.ones(_GPU_SIDE, _GPU_SIDE, device=f"cuda:{device}")
            is_wrong = wrong(ones @ ones, _GPU_SIDE)
        except Exception as error:  # noqa: BLE001 (reported)
            is_wrong = _one_line(error)
        if is_wrong:
            found.append(f"GPU {device}: {is_wrong}")
    return found


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def _run_under_mpi(folder: str) -> None:
    """Run as a process of mpirun, which sets its rank; reports are written to a file."""
    rank = next((int(os.environ[name]) for name in _MPI_RANKS if name in os.environ), 0)
    config = {"backend": "mpi", "rank": rank, "world_size": 0, "local_rank": rank, "addresses": []}
    with open(os.path.join(folder, f"rank-{rank}"), "w") as out:
        Program(config, out).run_all()


def main(argv: list[str]) -> None:
    """Run as one rank; prints of libraries go to stderr."""
    config = json.loads(argv[0])
    if config["backend"] == "mpi":
        _run_under_mpi(config["folder"])
        return
    die_with_parent(int(config["parent"]))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    Program(config, out).run()


if __name__ == "__main__":
    main(sys.argv[1:])
