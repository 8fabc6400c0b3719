"""Runs an unmodified example of ``run.build`` slowly, and dies in the middle of a step on order.

A file ``die-POINT`` in the folder is an order to the node that it names; its worker takes it and
kills itself: ``backward``, after some layers have reduced their gradients and before others;
``optimizer``, with all gradients and before this rank's update; ``build``, in the function that
builds the next world's model; ``restore``, before it reads its shards.
"""

from __future__ import annotations

import atexit
import functools
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from job_arguments import job_parser
from kit import nccl_semantics
from safetensors.torch import save_file

import checkpoints
import elastic
from elastic.testing.pacing import pause_after_step
from elastic.train import rebuilding
from elastic.train import run as builder
from elastic.train.sampler import ElasticSampler


def main() -> None:
    parser = job_parser()
    parser.add_argument("--example", type=Path, required=True)
    parser.add_argument("--memory-overhead", type=float, default=0.01)
    options, own = parser.parse_known_args()
    if os.environ.get("TRAINING_BACKEND") == nccl_semantics.NAME:
        nccl_semantics.use_by_default()
    folder = os.environ["ELASTIC_CHECKPOINTS"]

    def obey(point: str) -> None:
        order = options.folder / f"die-{point}"
        try:
            node = order.read_text()
        except FileNotFoundError:
            return  # there is no order, or another worker has taken it
        if node == os.environ["ELASTIC_NODE_NAME"]:
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    build, advance = builder.BuildsInWorlds.build, ElasticSampler.advance
    read_manifest = rebuilding.read_manifest  # type: ignore[attr-defined]

    def dying_build(run: Any, fn: Any) -> Any:
        def made(mesh: Any) -> Any:
            obey("build")
            return fn(mesh)

        model, optimizer = build(run, made)
        middle = next(m for m in model.modules() if isinstance(m, torch.nn.LayerNorm))
        middle.register_full_backward_hook(lambda *_: obey("backward"))
        optimizer.register_step_pre_hook(lambda *_: obey("optimizer"))
        return model, optimizer

    def dying_read(*args: Any) -> Any:
        obey("restore")
        return read_manifest(*args)

    def slow_advance(sampler: ElasticSampler) -> None:
        pause_after_step(options.folder / "hurry", options.step_s, sampler.epoch / options.epochs)
        advance(sampler)

    def keep_final() -> None:  # registered before the example joins: called after its last save
        found = checkpoints.latest(folder).checkpoint
        assert found is not None
        weights = checkpoints.load(folder, found.name).state["model"]["model"]
        part = options.folder / f"final.{os.getpid()}"
        save_file(weights, part)
        part.rename(options.folder / "final.safetensors")

    elastic.Checkpoints = functools.partial(  # type: ignore[misc, assignment]
        elastic.Checkpoints, memory_overhead=options.memory_overhead
    )
    builder.BuildsInWorlds.build = dying_build  # type: ignore[method-assign, assignment]
    ElasticSampler.advance = slow_advance  # type: ignore[method-assign, assignment]
    rebuilding.read_manifest = dying_read  # type: ignore[attr-defined, assignment]
    atexit.register(keep_final)
    sys.argv = [
        str(options.example),
        f"--checkpoints={folder}",
        f"--epochs={options.epochs}",
        f"--global-batch={options.batch}",
        f"--save-every={options.save_every}",
        *own,
    ]
    runpy.run_path(str(options.example), run_name="__main__")


if __name__ == "__main__":
    main()
