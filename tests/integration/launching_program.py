"""A program that launches several times and prints the results as one JSON object, keyed by launch.

``launching_program.py ENDPOINT PREFIX ID``. It uses only torch's public interface, as users do, and
imports nothing from this package.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

ENDPOINT, PREFIX, ID = sys.argv[1:4]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
run: Callable[..., Any] = torchrun.run  # (has no types)
parse_args: Callable[..., Any] = torchrun.parse_args
heard: list[int] = []


def config(name: str, start_method: str = "spawn", **more: Any) -> LaunchConfig:
    conf = {"prefix": PREFIX, "connect_timeout_s": "2"} | more.pop("rdzv_configs", {})
    settings = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": 2,
        "run_id": name if name == "none" else f"{ID}-{name}",
        "rdzv_backend": "etcd-v3",
        "rdzv_endpoint": ENDPOINT,
        "rdzv_configs": conf,
        "start_method": start_method,
        "max_restarts": 0,
        "local_addr": "127.0.0.1",
    }
    return LaunchConfig(**(settings | more))


def rank_and_node(number: int) -> tuple[int, int, str, bool]:
    has_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return int(os.environ["RANK"]), number, os.environ["ELASTIC_NODE_ID"], has_default


def run_id() -> str:
    return os.environ["TORCHELASTIC_RUN_ID"]


def fail() -> None:
    raise ValueError("this worker cannot go on")


def outcome(launch: Callable[[], Any]) -> dict[str, Any]:
    """The result of a launch, and the resources that it left in this program."""
    before = dict(os.environ), {s: signal.getsignal(s) for s in SIGNALS}
    try:
        seen: dict[str, Any] = {"result": launch(), "raised": []}
    except BaseException as error:  # noqa: BLE001 (the subject)
        kinds = [kind.__name__ for kind in type(error).__mro__]
        seen = {"result": None, "raised": kinds, "said": str(error)}
        seen["code"] = error.code if isinstance(error, SystemExit) else None
        if "RendezvousError" not in kinds and "ChildFailedError" not in kinds:
            traceback.print_exc()
    ours = [name for name in os.environ if name.startswith("ELASTIC_")]
    seen["new in the environment"] = [n for n in ours if os.environ[n] != before[0].get(n)]
    seen["other handlers"] = [s.name for s in SIGNALS if signal.getsignal(s) != before[1][s]]
    seen["threads"] = [t.name for t in threading.enumerate() if t.name.startswith("elastic-")]
    folder = tempfile.gettempdir()
    seen["left"] = [name for name in os.listdir(folder) if name.startswith("elastic-")]
    return seen


def in_except_clause() -> Any:
    """Retry within an ``except`` clause, as is common."""
    try:
        return elastic_launch(config("fails", "fork"), fail)()
    except Exception:  # noqa: BLE001 (as such programs do)
        return elastic_launch(config("again", "fork"), rank_and_node)(7)


def in_threads(launches: list[Callable[[], Any]]) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = [{} for _ in launches]

    def run(index: int) -> None:
        try:
            seen[index] = {"result": launches[index](), "raised": []}
        except BaseException as error:  # noqa: BLE001 (the subject)
            seen[index] = {"raised": [kind.__name__ for kind in type(error).__mro__]}

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(launches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def command_line(name: str) -> list[str]:
    given = [f"--rdzv-id={ID}-{name}", "--rdzv-backend=etcd-v3", f"--rdzv-endpoint={ENDPOINT}"]
    given += [f"--rdzv-conf='prefix={PREFIX}'", "--local-addr=127.0.0.1"]
    return [*given, "--nnodes=1", "--no-python", "true"]


def main() -> None:
    for number in SIGNALS:
        signal.signal(number, lambda signum, frame: heard.append(signum))
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound but not listening: refuses, and stays reserved
        nobody = f"127.0.0.1:{held.getsockname()[1]}"
        seen: dict[str, Any] = {
            # Workers that are not forked import torch for seconds: one is enough.
            "spawn": outcome(
                lambda: elastic_launch(config("one", nproc_per_node=1), rank_and_node)(3)
            ),
            "fork": outcome(lambda: elastic_launch(config("two", "fork"), rank_and_node)(4)),
            # The fork server starts once per program, with the environment at that time.
            "forkserver": outcome(
                lambda: elastic_launch(config("a", "forkserver", nproc_per_node=1), rank_and_node)(
                    5
                )
            ),
            "forkserver again": outcome(
                lambda: elastic_launch(config("b", "forkserver", nproc_per_node=1), rank_and_node)(
                    6
                )
            ),
            "script": outcome(
                lambda: elastic_launch(config("three"), sys.executable)("-c", "print(5)")
            ),
            "fails": outcome(lambda: elastic_launch(config("four", "fork"), fail)()),
            "again": outcome(in_except_clause),
            "used": outcome(lambda: elastic_launch(config("one"), rank_and_node)(3)),
            "used, main": outcome(lambda: torchrun.main(command_line("one"))),
            "used, run": outcome(lambda: run(parse_args(command_line("one")))),
            "none": outcome(lambda: elastic_launch(config("none", "fork"), run_id)()),
            "none again": outcome(lambda: elastic_launch(config("none", "fork"), run_id)()),
            "none, 1:2": outcome(
                lambda: elastic_launch(config("none", max_nodes=2), rank_and_node)(3)
            ),
            "wrong option": outcome(
                lambda: elastic_launch(config("five", rdzv_configs={"leases": "4"}), rank_and_node)(
                    3
                )
            ),
            "no etcd": outcome(
                lambda: elastic_launch(config("six", rdzv_endpoint=nobody), rank_and_node)(3)
            ),
            "not enough nodes": outcome(
                lambda: elastic_launch(
                    config("seven", min_nodes=2, max_nodes=2, rdzv_configs={"join_timeout": "1"}),
                    rank_and_node,
                )(3)
            ),
            "torch fails first": outcome(
                lambda: elastic_launch(config("eight", nproc_per_node=0), rank_and_node)(3)
            ),
            "unused": outcome(
                lambda: get_rendezvous_handler(
                    RendezvousParameters("etcd-v3", ENDPOINT, f"{ID}-nil", 1, 1, prefix=PREFIX)
                ).shutdown()
            ),
            "thread": outcome(
                lambda: in_threads(
                    [
                        lambda: elastic_launch(config("nine", nproc_per_node=1), rank_and_node)(1),
                        lambda: elastic_launch(config("ten", nproc_per_node=1), rank_and_node)(2),
                        lambda: elastic_launch(config("one"), rank_and_node)(3),
                    ]
                )
            ),
        }
    for number in SIGNALS:
        with contextlib.suppress(BaseException):
            signal.raise_signal(number)
    seen["heard"] = [signal.Signals(number).name for number in heard]
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
