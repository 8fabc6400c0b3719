"""The flags of ``elastic run``: torchrun's parser with additional flags and other defaults."""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import uuid
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from elastic.cli.command_parser import CommandParser, nearest
from elastic.cli.launch.torchrun_parser import torchrun_parser
from elastic.errors import ConfigError
from elastic.node.memory import machine_memory_bytes
from elastic.tuning.memory import human

OUR_BACKENDS = ("etcd-v3", "etcd")
STOCK_BACKENDS = ("c10d", "static", "etcd", "etcd-v2")
# The failure budget ends jobs; torchrun's restart count is never reset.
MAX_RESTARTS = 1_000_000
# Private memory, without a model, data and communicators. Measured with torch 2.13 for CPUs on
# x86-64 (Private_Dirty in smaps_rollup): 161 MiB for an agent, 204 MiB for a worker that trains.
_AGENT_BYTES = 160 << 20
_WORKER_BYTES = 200 << 20
_NNODES = re.compile(r"(\d+)(?::(\d+))?")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line (and ``PET_*``), apply our defaults, and validate.

    Raises:
        ConfigError: with the value, where it is set, and the remedy.
    """
    parser = build_parser()
    try:
        args = parser.parse_args(list(argv))
        fill_defaults(args)
        check(args)
    except ConfigError as error:
        raise _naming_variables(error, argv) from None
    return args


def _naming_variables(error: ConfigError, argv: Sequence[str]) -> ConfigError:
    """The same error; if it names a flag that only a ``PET_*`` variable sets, with the variable."""
    given = {argument.partition("=")[0].replace("_", "-") for argument in argv}
    for flag in re.findall(r"--[a-z][a-z_-]*", error.message):
        variable = f"PET_{flag.removeprefix('--').replace('-', '_').upper()}"
        if variable in os.environ and flag.replace("_", "-") not in given:
            value = os.environ[variable]
            return ConfigError(
                f"{error.message} (set by {variable}={value} in the environment)", hint=error.hint
            )
    return error


def build_parser() -> argparse.ArgumentParser:
    """torchrun's parser with our flags and defaults."""
    parser = _RunParser(
        prog="elastic run",
        description="Start or join a training job: torchrun with an etcd rendezvous, a failure "
        "budget, and one exit code per outcome.",
        epilog="exit codes: 0 done, 1 the script failed, 2 usage, 65 no valid checkpoint where "
        "one was required, 69 etcd unreachable, 70 failure budget spent, 71 preflight failed, 75 "
        "preempted and saved",
        parents=[torchrun_parser()],
        add_help=False,
    )
    ours = parser.add_argument_group("in addition to torchrun's")
    ours.add_argument(
        "--nodes-local",
        "--nodes_local",
        type=_positive,
        metavar="N",
        help="start N agents on this machine, one process each",
    )
    ours.add_argument(
        "--embedded-etcd",
        "--embedded_etcd",
        action="store_true",
        help="start an etcd on this machine for the duration of the job (laptops and tests)",
    )
    ours.add_argument(
        "--etcd-data",
        "--etcd_data",
        metavar="DIR",
        help="data folder of the embedded etcd (default: a temporary folder)",
    )
    for dest, default in (
        ("rdzv_backend", OUR_BACKENDS[0]),
        ("rdzv_id", None),
        ("nnodes", None),
        ("max_restarts", None),
    ):
        if f"PET_{dest.upper()}" not in os.environ:
            parser.set_defaults(**{dest: default})
    return parser


def is_ours(backend: str) -> bool:
    """Whether this package implements the backend."""
    if backend == "etcd" and os.environ.get("ELASTIC_STOCK_ETCD", "") in ("1", "true", "yes"):
        return False
    return backend in OUR_BACKENDS


def fill_defaults(args: argparse.Namespace) -> None:
    """Defaults that depend on other flags."""
    nodes = args.nodes_local or 1
    if args.nnodes is None:
        args.nnodes = f"1:{nodes}"
    if args.max_restarts is None:
        args.max_restarts = MAX_RESTARTS if is_ours(args.rdzv_backend) else 0
    if args.nodes_local and args.local_addr is None:
        args.local_addr = "127.0.0.1"
    args.rdzv_id_generated = args.rdzv_id is None
    if args.rdzv_id is None:
        args.rdzv_id = f"job-{uuid.uuid4().hex[:12]}"


def node_range(nnodes: str, flag: str = "--nnodes") -> tuple[int, int]:
    """``"2"`` and ``"2:4"`` as (min, max). Raises ConfigError that names the flag.

    >>> node_range("2:4")
    (2, 4)
    """
    match = _NNODES.fullmatch(nnodes)
    if match is None:
        raise ConfigError(
            f"{flag}={nnodes} is neither N nor MIN:MAX", hint=f"for example {flag}=2:4"
        )
    low = int(match[1])
    high = int(match[2] or low)
    if not 0 < low <= high:
        raise ConfigError(f"{flag}={nnodes}: needs 0 < MIN <= MAX", hint=f"for example {flag}=2:4")
    return low, high


def check(args: argparse.Namespace) -> None:
    """Refuse contradictory flags before anything is started. Raises ConfigError."""
    _check_backend(args)
    _check_workers(args)
    _check_nodes(args)
    _check_etcd(args)
    _check_script(args)
    if args.max_restarts < 0:
        raise ConfigError(
            f"--max-restarts={args.max_restarts} is negative",
            hint="omit it: the failure budget ends a job that cannot succeed",
        )


def _check_backend(args: argparse.Namespace) -> None:
    known = {*STOCK_BACKENDS, *(e.name for e in entry_points(group="torchrun.handlers"))}
    if args.rdzv_backend not in known:
        raise ConfigError(
            f"unknown --rdzv-backend={args.rdzv_backend}{nearest(args.rdzv_backend, known)}",
            hint=f"known: {', '.join(sorted(known))}",
        )


def _check_workers(args: argparse.Namespace) -> None:
    workers = str(args.nproc_per_node)
    if re.fullmatch(r"-?\d+", workers) and int(workers) < 1:  # torch refuses other texts
        raise ConfigError(
            f"--nproc-per-node={workers} is less than one worker",
            hint="give a number, or `gpu` for one worker for each GPU",
        )
    if not (math.isfinite(args.monitor_interval) and args.monitor_interval > 0):
        raise ConfigError(
            f"--monitor-interval={args.monitor_interval:g} is not a number of seconds above 0",
            hint="omit it, or give a number such as 0.1",
        )
    timeout_s = getattr(args, "shutdown_timeout", None)  # not in torch 2.11
    if timeout_s is not None and timeout_s < 0:
        raise ConfigError(
            f"--shutdown-timeout={timeout_s} is negative", hint="give a number of seconds"
        )


def most_local_nodes(args: argparse.Namespace, memory_bytes: int | None = None) -> int:
    """How many nodes of these flags fit into the memory of this machine; at least 1."""
    memory_bytes = machine_memory_bytes() if memory_bytes is None else memory_bytes
    workers = int(args.nproc_per_node) if str(args.nproc_per_node).isdecimal() else 1
    return max(1, memory_bytes // (_AGENT_BYTES + workers * _WORKER_BYTES))


def _check_nodes(args: argparse.Namespace) -> None:
    low, high = node_range(args.nnodes)
    local = args.nodes_local
    if local is None:
        return
    if local > (most := most_local_nodes(args)):
        raise ConfigError(
            f"--nodes-local={local} does not fit into the memory of this machine "
            f"({human(machine_memory_bytes())})",
            hint=f"an agent needs {human(_AGENT_BYTES)}, and a worker {human(_WORKER_BYTES)} or "
            f"more: use at most --nodes-local={most}",
        )
    if args.standalone:
        raise ConfigError(
            "--standalone starts one agent, --nodes-local several",
            hint="use --embedded-etcd instead of --standalone",
        )
    if local > 1 and args.rdzv_backend == "static":
        raise ConfigError(
            f"--nodes-local={local} needs a rendezvous, --rdzv-backend=static has none",
            hint="omit --rdzv-backend, or use c10d",
        )
    if local > high:
        raise ConfigError(
            f"--nodes-local={local} exceeds --nnodes={args.nnodes}",
            hint=f"use --nnodes={low}:{local}, or omit it",
        )
    if args.embedded_etcd and low > local:
        raise ConfigError(
            f"--nnodes={args.nnodes} waits for {low} nodes, and only the {local} of "
            "--nodes-local can reach the embedded etcd",
            hint=(f"use --nodes-local={low}, or " if low <= most else "use ")
            + "an external etcd with --rdzv-endpoint",
        )


def _check_etcd(args: argparse.Namespace) -> None:
    if args.etcd_data and not args.embedded_etcd:
        raise ConfigError(
            f"--etcd-data={args.etcd_data} without --embedded-etcd", hint="add --embedded-etcd"
        )
    if args.embedded_etcd and args.rdzv_endpoint:
        raise ConfigError(
            f"--embedded-etcd starts an etcd, --rdzv-endpoint={args.rdzv_endpoint} names one",
            hint="use one of the two",
        )
    if args.embedded_etcd and not is_ours(args.rdzv_backend):
        raise ConfigError(
            f"--rdzv-backend={args.rdzv_backend} cannot use the embedded etcd (v3)",
            hint="omit --rdzv-backend or --embedded-etcd",
        )
    if args.standalone or args.embedded_etcd or args.rdzv_endpoint:
        return
    if is_ours(args.rdzv_backend):
        raise ConfigError(
            "no etcd: neither --rdzv-endpoint nor --embedded-etcd is given",
            hint="use --rdzv-endpoint=HOST:2379, or --embedded-etcd on a single machine",
        )


def _check_script(args: argparse.Namespace) -> None:
    script: str = args.training_script
    if args.module:
        return
    if args.no_python and not args.run_path:
        if shutil.which(script) is None:
            raise ConfigError(
                f"training script {script!r} is not executable",
                hint="--no-python needs an executable, on PATH or as a path",
            )
    elif not Path(script).is_file():
        raise ConfigError(
            f"training script {script!r} does not exist in {Path.cwd()}",
            hint="give its path; for a module use -m",
        )


class _RunParser(CommandParser):
    """Check the script here: argparse would print torchrun's internal argument name."""

    def error(self, message: str) -> NoReturn:
        if "training_script" in message:
            raise ConfigError(
                "no training script is given", hint="usage: elastic run FLAGS SCRIPT ..."
            )
        super().error(message)

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """The flags of which ``option_string`` is an abbreviation: none if it fits several. The
        argparse of Python 3.11 refuses it then, even if it is an argument of the script."""
        found: list[Any] = super()._get_option_tuples(option_string)
        actions = {id(action) for action, *_ in found}
        return found[:1] if len(actions) == 1 else []


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number
