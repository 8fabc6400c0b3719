"""The speed of messages of each size, through torch and through a plain TCP stream.

Rank 0 and one other rank at a time send a message back and forth; the others wait.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from elastic.clock import SYSTEM_CLOCK
from elastic.tuning.doctor_intervals import DOCTOR_RAW_CONNECT_S, DOCTOR_SLOW_ROUND_TRIP_S

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
