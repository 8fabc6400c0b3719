"""A program that launches forked workers, for fault-injection tests: ``forking_program.py ENDPOINT
PREFIX ID FOLDER [stubborn]``. Every process records its identity in the folder.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

ENDPOINT, PREFIX, ID, FOLDER = sys.argv[1:5]
IS_STUBBORN = sys.argv[5:] == ["stubborn"]  # workers do not end with their parent on their own


def note(name: str, text: str) -> None:
    file = Path(FOLDER, f"{name}.part")
    file.write_text(text)
    file.rename(Path(FOLDER, name))


def wait_for(name: str) -> None:
    while not Path(FOLDER, name).exists():
        time.sleep(0.02)


def handler_of_sigterm() -> str:
    handler = signal.getsignal(signal.SIGTERM)
    return getattr(handler, "__name__", None) or str(handler)


def worker() -> None:
    """In the first attempt, rank 0 fails and rank 1 is terminated; in the second, both keep
    running.
    """
    rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    if IS_STUBBORN:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a collective that does not return
    if rank == "0" and restart == "0":
        wait_for("worker-1-0")
        raise ValueError("the first time is for nothing")
    if IS_STUBBORN and rank == "1" and restart == "1" and os.fork() == 0:
        note("child of worker", str(os.getpid()))
        time.sleep(600)
    note(f"worker-{rank}-{restart}", f"{os.getpid()} {handler_of_sigterm()}")
    time.sleep(600)


def bystander() -> None:
    """The program also forks a process of its own while its workers run."""
    wait_for("worker-1-0")
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        note("bystander", f"{os.getpid()} {handler_of_sigterm()}")
        time.sleep(600)


def of_the_program(signum: int, frame: object) -> None:
    note("heard", signal.Signals(signum).name)


def main() -> None:
    signal.signal(signal.SIGTERM, of_the_program)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=bystander, daemon=True).start()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=ID,
        rdzv_backend="etcd-v3",
        rdzv_endpoint=ENDPOINT,
        rdzv_configs={"prefix": PREFIX},
        start_method="fork",
        max_restarts=1,
        monitor_interval=0.1,
        local_addr="127.0.0.1",
    )
    try:
        elastic_launch(config, worker)()
    except SignalException as error:
        note("raised", error.sigval.name)
    threads = [t.name for t in threading.enumerate() if t.name.startswith("elastic-")]
    note("threads", " ".join(threads))
    signal.raise_signal(signal.SIGTERM)
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        note("interrupted", "")


if __name__ == "__main__":
    main()
