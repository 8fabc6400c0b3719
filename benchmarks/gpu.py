"""What the harness costs on a GPU, in a world of one on NCCL.

    python benchmarks/gpu.py            results to benchmarks/results/gpu-<name of the GPU>.json

step
    A step of a perceptron of 33 million parameters under plain DDP and under ElasticDDP with the
    host's wait for gradients, which takes the overlap of the host with the device. In turns within
    one process; the medians.
build, abort, destroy
    Of a group of one, eagerly initialised.
stall, copy
    Of a save of 4 GiB in 64 tensors: as long as it holds up training, and a plain copy of as many
    bytes into pinned memory just before. The medians.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import checkpoints
from elastic.groups.group import ProcessGroup
from elastic.link.link import GroupSpec
from elastic.testing.reaper import reap_descendants
from elastic.train.ddp import ElasticDDP
from elastic.wire.handshake import SecretKey

RESULTS = Path(__file__).parent / "results"
TURNS, STEPS, GROUPS = 20, 50, 20
SAVES, TENSORS, SAVED_BYTES = 7, 64, 4 << 30


def main() -> None:
    reap_descendants()
    if not torch.cuda.is_available():
        sys.exit("torch.cuda.is_available() is false: this benchmark takes a GPU")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    group = ProcessGroup(device, "nccl")
    found = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__}
    numbers = measure_groups(group) | measure_steps(group, device) | measure_saves(device)
    name = found["gpu"].lower().replace(" ", "-")
    path = RESULTS / f"gpu-{name}.json"
    path.write_text(json.dumps({**found, **numbers}, indent=2) + "\n")
    print(path.read_text())


def build(group: ProcessGroup, generation: int) -> None:
    spec = GroupSpec(
        generation=generation,
        nonce=str(generation),
        rank=0,
        size=1,
        store_host="127.0.0.1",
        store_port=1,
        store_key=SecretKey(bytes(32)).text,
    )
    group.build(spec, superseded=lambda: False, timeout_s=120.0)


def measure_groups(group: ProcessGroup) -> dict[str, float]:
    took: dict[str, list[float]] = {"build_ms": [], "abort_ms": [], "destroy_ms": []}
    for number in range(GROUPS):
        took["build_ms"].append(timed(lambda number=number: build(group, number)))  # type: ignore[misc]
        if number % 2:
            group.abort()  # returns at once
            took["abort_ms"].append(timed(group.destroy))
        else:
            took["destroy_ms"].append(timed(group.destroy))
    return {name: statistics.median(values) for name, values in took.items()}


def measure_steps(group: ProcessGroup, device: torch.device) -> dict[str, float]:
    build(group, GROUPS)
    plain = DistributedDataParallel(network(device), device_ids=[device.index])
    ours = ElasticDDP(network(device))
    ours.enter_world()
    inputs = torch.randn(256, 2048, device=device)
    turns: dict[str, list[float]] = {"plain_ms": [], "elastic_ms": []}
    steppers = {"plain_ms": stepper(plain, inputs), "elastic_ms": stepper(ours, inputs)}
    for turn in range(TURNS):
        for name, step in steppers.items():
            took = timed(lambda step=step: [step() for _ in range(STEPS)]) / STEPS  # type: ignore[misc]
            if turn:  # the first one warms up
                turns[name].append(took)
    ours.leave_world()
    del plain, steppers
    group.destroy()
    return {name: statistics.median(values) for name, values in turns.items()}


def measure_saves(device: torch.device) -> dict[str, float]:
    state = {
        f"t{i}": torch.randn(SAVED_BYTES // 4 // TENSORS, device=device) for i in range(TENSORS)
    }
    pinned = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in state.values()]

    def copy() -> None:
        for into, tensor in zip(pinned, state.values(), strict=True):
            into.copy_(tensor, non_blocking=True)

    took: dict[str, list[float]] = {"stall_ms": [], "copy_ms": []}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        engine = checkpoints.Engine(Path(folder), keep=checkpoints.LatestN(1))
        engine.reserve(state, rank=0, world_size=1)
        for step in range(1, SAVES + 1):
            took["copy_ms"].append(timed(copy))
            world = checkpoints.WriterGroup(nonce="bench", rank=0, size=1)
            outcome = engine.save_async(state, step=step, world=world).wait()
            assert outcome is not None and outcome.status is checkpoints.SaveStatus.COMMITTED
            took["stall_ms"].append(outcome.stall_s * 1e3)
        engine.close()
    return {name: statistics.median(values) for name, values in took.items()}


def stepper(model: nn.Module, inputs: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        if isinstance(model, ElasticDDP):
            model.begin_step(1.0)
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if isinstance(model, ElasticDDP):
            model.reduction.wait()  # as before each optimizer step in a job
        optimizer.step()

    return step


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    first = (nn.Linear(2048, 2048), nn.GELU())
    return nn.Sequential(*first, *[nn.Linear(2048, 2048) for _ in range(7)]).to(device)


def timed(call: Callable[[], object]) -> float:
    """Milliseconds, until the device is idle again."""
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began_s) * 1e3


if __name__ == "__main__":
    main()
