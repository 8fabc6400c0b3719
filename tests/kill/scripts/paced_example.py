"""Runs an unmodified example of a sharded model slowly, and logs the samples of its steps.

The example distributes its data with an ElasticSampler, and calls ``advance`` after each optimizer
step and before it saves, so a committed checkpoint holds only steps that every rank has logged. The
ledger has the samples of the first rank of each data-parallel position; the ``samples`` folder has
those of all ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

from job_arguments import job_parser
from safetensors.torch import save, save_file

import checkpoints
from elastic import ElasticSampler
from elastic.telemetry.ledger import Ledger
from elastic.testing.pacing import pause_after_step
from elastic.train.sampler import RankStep


def main() -> None:
    parser = job_parser()
    parser.add_argument("--example", type=Path, required=True)
    options, own = parser.parse_known_args()

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    generation = json.loads(os.environ.get("ELASTIC_WORLD", '{"generation": 1}'))["generation"]
    folder = os.environ["ELASTIC_CHECKPOINTS"]
    ledger = Ledger.from_environment()
    (options.folder / "samples").mkdir(exist_ok=True)
    seen = (options.folder / "samples" / f"{os.getpid()}.jsonl").open("a", buffering=1)
    steps, advance = ElasticSampler.steps, ElasticSampler.advance

    def noted_steps(sampler: ElasticSampler, micro_batch: int | None = None) -> Iterator[RankStep]:
        node = os.environ["ELASTIC_NODE_NAME"]
        step = number(sampler)
        ledger.start(generation=generation, step=step, rank=rank, size=size, node=node)
        return steps(sampler, micro_batch)

    def noted_advance(sampler: ElasticSampler) -> None:
        samples = next(steps(sampler)).indices
        step, epoch, copies = number(sampler), sampler.epoch, size // sampler.num_replicas
        line = {"generation": generation, "step": step, "position": sampler.rank}
        seen.write(json.dumps({**line, "rank": rank, "samples": samples}) + "\n")
        counted = samples if rank % copies == 0 else ()
        ledger.step(generation=generation, step=step, epoch=epoch, rank=rank, samples=counted)
        pause_after_step(options.folder / "hurry", options.step_s, epoch / options.epochs)
        advance(sampler)

    ElasticSampler.steps, ElasticSampler.advance = noted_steps, noted_advance  # type: ignore[assignment, method-assign]
    sys.argv = [
        str(options.example),
        f"--checkpoints={folder}",
        f"--epochs={options.epochs}",
        f"--global-batch={options.batch}",
        f"--every-steps={options.save_every}",
        *own,
    ]
    runpy.run_path(str(options.example), run_name="__main__")

    found = checkpoints.latest(folder).checkpoint
    assert found is not None
    weights = checkpoints.load(folder, found.name).state["model"]
    sha256 = hashlib.sha256(save(weights)).hexdigest()
    if rank == 0:
        save_file(weights, options.folder / "final.safetensors")
    ledger.end(generation=generation, step=found.step, rank=rank, sha256=sha256)


def number(sampler: ElasticSampler) -> int:
    """The number of the next step, over all epochs."""
    return sampler.epoch * sampler.plan.steps + sampler.step


if __name__ == "__main__":
    main()
