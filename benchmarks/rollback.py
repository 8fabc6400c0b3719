"""What it costs to be able to undo a step: the copy of its large state at its beginning.

    python benchmarks/rollback.py                  as a table
    python benchmarks/rollback.py --json           one JSON object (measurement.py)
    python benchmarks/rollback.py --sizes 1 64     models of 1 and 64 MiB
    python benchmarks/rollback.py --device cuda    of a state on a GPU

One process trains a stack of linear layers with AdamW, whose state is three times the weights. The
cases take turns, in an order at random:

boundary
    What each step begins with: the copy of the small state alone (``never``), and with the large
    state (``always``).
memcpy
    A plain copy of as many bytes, with all threads of torch, for comparison.
step
    Forward, backward and update, without either.
undo
    To return to the boundary.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import torch
from measurement import Report, Row
from torch import nn

from elastic.train.ddp import ElasticDDP
from elastic.train.rollback import Rollback, StepCopies
from elastic.train.state import JobState

SEED = 7
WARM_UP = 5
LAYERS = 8
BATCH = 64


def measured(size_mib: int, times: int, device: torch.device) -> list[Row]:
    """The rows of a model with ``size_mib`` MiB of weights."""
    width = int((size_mib * 2**20 / 4 / LAYERS) ** 0.5)
    torch.manual_seed(SEED)
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))).to(device)
    job = JobState(seed=SEED)
    job.modules["model"] = ElasticDDP(module)
    optimizer = torch.optim.AdamW(module.parameters())
    job.track("optimizer", optimizer)
    batch = torch.randn(BATCH, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        module(batch).square().mean().backward()
        optimizer.step()

    step()
    rollbacks = {m: Rollback(job, {"optimizer": optimizer}, m) for m in StepCopies}
    for rollback in rollbacks.values():
        for _ in range(WARM_UP):  # the first steps are always copied
            rollback.take()
            rollback.committed()
    always = rollbacks[StepCopies.ALWAYS]
    source = torch.randn(3 * sum(p.numel() for p in module.parameters()), device=device)
    target = torch.empty_like(source)
    cases: dict[str, Callable[[], object]] = {
        "boundary, never": rollbacks[StepCopies.NEVER].take,
        "boundary, always": always.take,
        "memcpy": lambda: target.copy_(source),
        "step": step,
        "undo": always.restore,
    }
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(times):
        for name in random.sample(list(cases), len(cases)):
            began_s = time.perf_counter()
            cases[name]()
            finish(device)
            samples[name].append((time.perf_counter() - began_s) * 1e3)
    subject = f"{size_mib} MiB"
    rows = [Row(name, subject, "ms", tuple(values)) for name, values in samples.items()]
    copies = zip(samples["boundary, always"], samples["step"], strict=True)
    return [*rows, Row("boundary / step", subject, "ratio", tuple(c / s for c, s in copies))]


def finish(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 64, 256], metavar="MiB")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    random.seed(SEED)
    rows = [row for size in args.sizes for row in measured(size, args.times, args.device)]
    Report("rollback", SEED, tuple(rows)).show(as_json=args.json)


if __name__ == "__main__":
    main()
