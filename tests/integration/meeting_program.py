"""One of several programs that launch the same job: ``meeting_program.py ENDPOINT PREFIX ID``.

It reports that it is ready, launches on request, and prints its results. It follows torch's own
test of several agents, each of which is a process that calls ``elastic_launch``.
"""

from __future__ import annotations

import json
import os
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

ENDPOINT, PREFIX, ID = sys.argv[1:4]


def rank_and_size() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main() -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=2,
        nproc_per_node=2,
        run_id=ID,
        rdzv_backend="etcd-v3",
        rdzv_endpoint=ENDPOINT,
        rdzv_configs={"prefix": PREFIX},
        monitor_interval=1,
        start_method="fork",
        local_addr="127.0.0.1",
    )
    print("ready", flush=True)
    sys.stdin.readline()
    results = elastic_launch(config, rank_and_size)()
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
