"""Runs an unmodified example with ``elastic.join()`` slowly: each step is followed by a pause until
the test's ``hurry``. The library writes the ledger. ``JOB_MESH``: other dimensions.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from job_arguments import job_parser

import elastic
from elastic.testing.pacing import pause_after_step


def main() -> None:
    parser = job_parser()
    parser.add_argument("--example", type=Path, required=True)
    options, own = parser.parse_known_args()
    join, hurry = elastic.join, options.folder / "hurry"

    def paced_join(**given: Any) -> elastic.Run:
        if mesh := os.environ.get("JOB_MESH"):
            given["mesh"] = json.loads(mesh)
        run = join(**given)
        run.after_step(
            lambda step: pause_after_step(hurry, options.step_s, step.epoch / options.epochs)
        )
        return run

    elastic.join = paced_join
    sys.argv = [
        str(options.example),
        f"--checkpoints={os.environ['ELASTIC_CHECKPOINTS']}",
        f"--samples={options.samples}",
        f"--epochs={options.epochs}",
        f"--global-batch={options.batch}",
        f"--every-steps={options.save_every}",
        f"--weights={options.folder / 'final.safetensors'}",
        *own,
    ]
    runpy.run_path(str(options.example), run_name="__main__")


if __name__ == "__main__":
    main()
