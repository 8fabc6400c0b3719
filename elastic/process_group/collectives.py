"""Collectives for small JSON values and for tensors: what torch offers for objects is pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from elastic.process_group.pending import pending_works
from elastic.process_group.semantics import semantics_of


def control_device() -> torch.device:
    """Where small control tensors live: the CPU if the group can move them, else the GPU."""
    backend = dist.get_backend_config()
    if "cpu" in str(backend) or dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def complete(work: dist.Work | None, device: torch.device) -> None:
    """Return when the results of a collective on ``device`` are there for the host to read.

    Raises what went wrong, or GroupAborted.
    """
    semantics, works = semantics_of(device.type), pending_works()
    if not semantics.is_on_stream:
        works.wait(work)
        semantics.synchronize(device)
        return
    works.finish_on_stream(work)
    semantics.synchronize(device)
    works.raise_if_aborted()


def broadcast_json(value: Any, source: int = 0) -> Any:
    """Give every rank the JSON value that ``source`` holds; others may pass anything."""
    if dist.get_world_size() == 1:
        return value
    device = control_device()
    is_source = dist.get_rank() == source
    data = json.dumps(value).encode() if is_source else b""
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    complete(dist.broadcast(size, source, async_op=True), device)
    buffer = _bytes_tensor(data, int(size.item()), device)
    complete(dist.broadcast(buffer, source, async_op=True), device)
    return value if is_source else json.loads(bytes(buffer.cpu().tolist()))


def all_gather_json(value: Any) -> list[Any]:
    """Every rank's JSON value, in rank order."""
    if dist.get_world_size() == 1:
        return [value]
    device = control_device()
    data = json.dumps(value).encode()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    mine = torch.tensor([len(data)], dtype=torch.int64, device=device)
    complete(dist.all_gather(sizes, mine, async_op=True), device)
    longest = max(int(size.item()) for size in sizes)
    buffers = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in sizes]
    mine = _bytes_tensor(data, longest, device)
    complete(dist.all_gather(buffers, mine, async_op=True), device)
    return [
        json.loads(bytes(buffer[: int(size.item())].cpu().tolist()))
        for buffer, size in zip(buffers, sizes, strict=True)
    ]


def all_sum(values: Sequence[float]) -> list[float]:
    """The sum over all ranks of each value, in double precision."""
    device = control_device()
    total = torch.tensor(list(values), dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        complete(dist.all_reduce(total, async_op=True), device)
    return [float(v) for v in total.tolist()]


def broadcast_tensors(tensors: Mapping[str, torch.Tensor], source: int = 0) -> None:
    """Overwrite every rank's tensors with those of ``source``; same names and shapes everywhere."""
    if dist.get_world_size() == 1:
        return
    device = control_device()
    with torch.no_grad():
        for name in sorted(tensors):
            tensor = tensors[name].detach()
            moved = tensor.contiguous()
            if moved.device.type == "cpu":
                moved = moved.to(device)
            complete(dist.broadcast(moved, source, async_op=True), moved.device)
            if moved.data_ptr() != tensor.data_ptr():
                tensor.copy_(moved)


def _bytes_tensor(data: bytes, size: int, device: torch.device) -> torch.Tensor:
    padded = bytearray(data.ljust(max(size, 1), b"\0"))
    return torch.frombuffer(padded, dtype=torch.uint8)[:size].to(device)
