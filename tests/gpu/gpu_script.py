"""Scenarios that need their own CUDA context: test_one_gpu.py runs each function as a process.

The functions take no arguments; their results are printed as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from checkpoints.save_plan import SavePlanner
from checkpoints.tensors import bytes_of
from elastic.errors import GroupAborted
from elastic.groups.collectives import complete
from elastic.groups.group import ProcessGroup
from elastic.link.link import GroupSpec
from elastic.train.ddp import ElasticDDP
from elastic.train.reduction import Reduction
from elastic.wire.handshake import SecretKey

DEVICE = torch.device("cuda", 0)
SLEEP_CYCLES = 4_000_000_000  # some seconds on any GPU
REBUILDS, WARM_UP = 200, 20


def spec(generation: int) -> GroupSpec:
    return GroupSpec(
        generation=generation,
        nonce=f"n{generation}",
        rank=0,
        size=1,
        store_host="127.0.0.1",
        store_port=1,
        store_key=SecretKey(bytes(32)).text,
    )


@contextmanager
def built(group: ProcessGroup, generation: int = 1) -> Iterator[None]:
    group.build(spec(generation), superseded=lambda: False, timeout_s=120.0)
    yield
    group.destroy()


def train(model: ElasticDDP, steps: int) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = torch.zeros(())
    for _ in range(steps):
        model.begin_step(1.0)
        loss = model(torch.ones(16, 64, device=DEVICE)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        model.reduction.wait()
        optimizer.step()
    return float(loss)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).to(DEVICE)


def world_of_one(backend: str | None = None) -> dict[str, Any]:
    """Collectives on NCCL, and a step of a wrapped module."""
    group = ProcessGroup(DEVICE, backend)
    with built(group):
        tensor = torch.full((1 << 20,), 3.0, device=DEVICE)
        complete(dist.all_reduce(tensor, async_op=True), DEVICE)
        model = ElasticDDP(network())
        model.enter_world()
        loss = train(model, 5)
        model.leave_world()
    return {"sum": float(tensor.sum()), "is_finite": loss == loss}


def nccl_alone() -> dict[str, Any]:
    return world_of_one("nccl")


def queued_steps() -> dict[str, Any]:
    """An abort while a collective is queued behind running kernels."""
    group = ProcessGroup(DEVICE, "nccl")
    group.build(spec(1), superseded=lambda: False, timeout_s=120.0)
    weights = torch.ones(1024, device=DEVICE)
    gradients = torch.ones(1024, device=DEVICE)
    dist.all_reduce(gradients)
    torch.cuda.synchronize()
    reduction = Reduction()
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None
    reduction.works.append(work)
    threading.Timer(0.2, group.abort).start()
    began_s, is_aborted = time.monotonic(), False
    try:
        reduction.wait()
        weights -= gradients
    except GroupAborted:
        is_aborted = True
    waited_s = time.monotonic() - began_s
    group.destroy()
    return {"is_aborted": is_aborted, "waited_s": waited_s, "weights": float(weights.sum())}


def rebuilds() -> dict[str, Any]:
    """Groups are built and destroyed, every other one after an abort."""
    group, free = ProcessGroup(DEVICE, "nccl"), []
    model = ElasticDDP(network())
    took_s = []
    for number in range(REBUILDS):
        began_s = time.monotonic()
        group.build(spec(number), superseded=lambda: False, timeout_s=120.0)
        model.enter_world()
        took_s.append(time.monotonic() - began_s)
        train(model, 1)
        if number % 2:
            group.abort()
        model.leave_world()
        group.destroy()
        free.append(torch.cuda.mem_get_info(DEVICE)[0])
    lost = free[WARM_UP] - free[-1]
    return {"lost_bytes": lost, "build_s": sorted(took_s)[len(took_s) // 2]}


def compiled() -> dict[str, Any]:
    """A compiled module and a CUDA graph outlive the world in which they were created."""
    group, model = ProcessGroup(DEVICE, "nccl"), ElasticDDP(network())
    fast: Any = torch.compile(model)
    losses = []
    for generation in range(1, 4):
        with built(group, generation):
            model.enter_world()
            model.begin_step(1.0)
            loss = fast(torch.ones(16, 64, device=DEVICE)).square().mean()
            loss.backward()
            model.reduction.wait()
            losses.append(float(loss))
            model.zero_grad()
            model.leave_world()
    return {"losses": losses}


def graphs() -> dict[str, Any]:
    group, module = ProcessGroup(DEVICE, "nccl"), network()
    inputs = torch.ones(16, 64, device=DEVICE)
    graph, sums = torch.cuda.CUDAGraph(), []
    with torch.no_grad(), built(group, 1):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            module(inputs)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            outputs = module(inputs)
        graph.replay()
        sums.append(float(outputs.sum()))
    with built(group, 2):
        graph.replay()
        sums.append(float(outputs.sum()))
    return {"sums": sums}


def staged() -> dict[str, Any]:
    """As the state of an optimizer, whose steps are on the CPU between its moments on the GPU."""
    devices = (DEVICE, "cpu", DEVICE, DEVICE)
    state = [torch.full((3, 5), float(i), device=devices[i % 4]) for i in range(600)]
    state += [torch.full((7,), i, device=DEVICE, dtype=torch.float64) for i in range(600)]
    planned = SavePlanner().plan(state, world_size=1, rank=0)
    memory = torch.zeros(planned.plan.size_bytes, dtype=torch.uint8, pin_memory=True)
    planned.copy_into(memory)
    pieces = planned.named().pieces
    expected = b"".join(bytes(bytes_of(state[int(spec.name)], at)) for spec, at in pieces)
    return {"is_exact": memory.numpy().tobytes() == expected}


if __name__ == "__main__":
    torch.cuda.set_device(DEVICE)
    print(json.dumps(globals()[sys.argv[1]]()))
