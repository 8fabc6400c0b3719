"""``elastic run``: torchrun, with exit codes that say why a job ended, and local nodes."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import json
import math
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn, cast

from elastic.agent import tuning
from elastic.agent.node import machine_memory_bytes
from elastic.child_interpreters import module_command
from elastic.cli import arguments, bound_to_parent
from elastic.cli.arguments import CommandParser, at_least, nearest
from elastic.errors import SYSTEM_CLOCK, Clock, ConfigError, ElasticError, Preempted
from elastic.membership.records import Keys
from elastic.store.client import etcd_config
from elastic.telemetry.log import wrapped
from elastic.telemetry.output import OutputLines, with_origin
from elastic.telemetry.runs import after_its_end, is_known, while_it_runs
from elastic.tuning.environment import human
from elastic.tuning.intervals import (
    CLI_POLL_S,
)
from elastic.tuning.options import signals_to_handle

# How long local agents may run if others have failed and too few remain for the job: they wait for
# nodes that will not be started.
CLI_TOO_FEW_S = 5.0
# Silence after which a start is explained. On an idle laptop, torch is imported in 3 s.
CLI_SLOW_START_S = 15.0
IMPORTS = "importing torch takes seconds, and a minute on a busy machine or from a cold disk"

# ----------------------------------------------------------------------------
# torchrun's argument parser without the import of torch, which takes seconds.
#
# ``elastic run -h`` and usage errors need only torchrun's flags. So the
# function that builds the parser (``torch.distributed.run.get_args_parser``) is read from the
# installed torch's source and executed together with the few definitions it refers to. If that
# fails, because a torch version builds its parser from something heavier, torch is imported.
# ``tests/contract/test_torchrun_parser.py`` compares the two parsers.

_MODULE, _FUNCTION = "torch.distributed.run", "get_args_parser"


def torchrun_parser() -> argparse.ArgumentParser:
    """The parser of the installed torchrun, ``-h`` included."""
    if _MODULE in sys.modules:
        return imported_parser()
    try:
        parser = _Sources().load(_MODULE, _FUNCTION)()
    except _CANNOT_BE_READ:
        return imported_parser()
    return cast("argparse.ArgumentParser", parser)


def imported_parser() -> argparse.ArgumentParser:
    """The same parser from torch itself. Imports torch: seconds."""
    from torch.distributed.run import get_args_parser

    return get_args_parser()


class _TooHeavy(Exception):
    """The definition needs more of torch than its source code."""


# Raised for an unknown torch whose source cannot be read this way; then torch is imported.
_CANNOT_BE_READ = (
    _TooHeavy,
    ImportError,
    NameError,
    AttributeError,
    SyntaxError,
    OSError,
    RecursionError,
)


class _Sources:
    """Executes single definitions of torch's modules, with the definitions they refer to."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            raise _TooHeavy("torch is not installed as a folder")
        self._root = Path(spec.origin).parent
        self._loaded: dict[tuple[str, str], Any] = {}
        self._trees: dict[str, ast.Module] = {}

    def load(self, module: str, name: str) -> Any:
        """The object that ``from module import name`` would bind."""
        key = module, name
        if key not in self._loaded:
            self._loaded[key] = self._load(module, name)
        return self._loaded[key]

    def _load(self, module: str, name: str) -> Any:
        statement = self._binding(module, name)
        if isinstance(statement, ast.ImportFrom):
            return self._imported_from(statement, name)
        if isinstance(statement, ast.Import):
            return self._imported(statement, name)
        namespace: dict[str, Any] = {"__name__": module}
        for free in _names_read(statement):
            if free != name and _binds(self._tree(module), free) is not None:
                namespace[free] = self.load(module, free)
        code = ast.Module([statement], type_ignores=[])
        exec(compile(code, str(self._file(module)), "exec", dont_inherit=True), namespace)
        return namespace[name]

    def _imported_from(self, statement: ast.ImportFrom, name: str) -> Any:
        source = statement.module or ""
        original = next(a.name for a in statement.names if (a.asname or a.name) == name)
        if statement.level or source == "torch":
            raise _TooHeavy(f"{name} is imported from {'.' * statement.level}{source}")
        if source.startswith("torch."):
            return self.load(source, original)
        return getattr(importlib.import_module(source), original)

    def _imported(self, statement: ast.Import, name: str) -> Any:
        original = next(a.name for a in statement.names if (a.asname or a.name) == name)
        if original.partition(".")[0] == "torch":
            raise _TooHeavy(f"{name} is {original}")
        return importlib.import_module(original)

    def _binding(self, module: str, name: str) -> ast.stmt:
        statement = _binds(self._tree(module), name)
        if statement is None:
            raise _TooHeavy(f"{module} has no {name}")
        return statement

    def _tree(self, module: str) -> ast.Module:
        if module not in self._trees:  # parsing is slow: each file once
            self._trees[module] = ast.parse(self._file(module).read_bytes())
        return self._trees[module]

    def _file(self, module: str) -> Path:
        parts = module.split(".")[1:]
        folder = self._root.joinpath(*parts)
        return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def _binds(tree: ast.Module, name: str) -> ast.stmt | None:
    """The top-level statement that gives ``name`` its value: a definition or an import."""
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            bound = {statement.name}
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            bound = {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, ast.Assign):
            bound = {target.id for target in statement.targets if isinstance(target, ast.Name)}
        else:
            continue
        if name in bound:
            return statement
    return None


def _names_read(statement: ast.stmt) -> set[str]:
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


# ----------------------------------------------------------------------------
# The flags of ``elastic run``: torchrun's parser with additional flags and other defaults.

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
        usage="elastic run [OPTIONS] SCRIPT [ARGUMENTS]",
        description="Start or join a training job: torchrun with an etcd rendezvous, a failure "
        "budget, and one exit code per outcome.",
        epilog="exit codes: 0 done, 1 the script failed, 2 usage, 65 no valid checkpoint where "
        "one was required, 69 etcd unreachable, 70 failure budget spent, 71 preflight failed, 75 "
        "preempted and saved",
        parents=[torchrun_parser()],
        add_help=False,
    )
    ours = parser.add_argument_group("options beyond torchrun's")
    parser._action_groups.insert(0, parser._action_groups.pop())  # before its thirty
    ours.add_argument(
        "--nodes-local",
        "--nodes_local",
        type=at_least(1),
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
    _check_options(args)
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
    # (torch knows the names of devices.)
    if not workers.isidentifier() and not (workers.isdecimal() and int(workers)):
        raise ConfigError(
            f"--nproc-per-node={workers} is not a number of workers",
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
    signals_to_handle(args.signals_to_handle)


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


def _check_options(args: argparse.Namespace) -> None:
    """What the agents check, which know it only once they have imported torch."""
    if args.standalone or not is_ours(args.rdzv_backend):
        return
    options = arguments.agent_options(args.rdzv_conf)
    Keys.of(options.prefix, args.rdzv_id)
    tuning.check(options, os.environ, max_nodes=node_range(args.nnodes)[1])
    if args.rdzv_endpoint:
        etcd_config(args.rdzv_endpoint, options)


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
        flags: list[Any] = super()._get_option_tuples(option_string)
        actions = {id(action) for action, *_ in flags}
        return flags[:1] if len(actions) == 1 else []


# ----------------------------------------------------------------------------
# Process trees on this machine, read from /proc, which needs no dependency on psutil.


def tree(root: int) -> tuple[int, ...]:
    """``root`` and its living descendants, parents first; empty if it has ended.

    Independent of sessions and process groups: torchrun gives each worker its own.
    """
    children: dict[int, list[int]] = {}
    alive: set[int] = set()
    for pid, parent in _parents():
        alive.add(pid)
        children.setdefault(parent, []).append(pid)
    pids = [root] if root in alive else []
    for pid in pids:  # grows during the loop: breadth first
        pids.extend(children.get(pid, ()))
    return tuple(pids)


def kill_tree(root: int) -> tuple[int, ...]:
    """SIGKILL ``root`` and all its descendants, as a failure of the machine; returns their pids.

    The root is stopped first, so that it can neither start children nor clean up after them.
    """
    send([root], signal.SIGSTOP)
    pids = tree(root)
    send(pids, signal.SIGKILL)
    return pids


def send(pids: Iterable[int], signum: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            pass


def _parents() -> Iterable[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:  # it ended meanwhile
            continue
        state, parent = stat.rpartition(")")[2].split()[:2]  # a name may contain anything
        if state not in "ZX":
            yield int(entry.name), int(parent)


# ----------------------------------------------------------------------------
# Several nodes on one machine: each an agent process in a separate session.
#
# The owner calls :meth:`LocalNodes.pump` in a loop; it passes on the nodes' output line by line
# and detects ended processes. Not thread-safe.

LineSink = Callable[[str, str, str], None]  # node name, "stdout" or "stderr", line
_BOUND_TO_PARENT = Path(bound_to_parent.__file__)


@dataclass
class NodeProcess:
    """One node: its agent, and through it the workers."""

    name: str
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self.process.poll()


@dataclass(frozen=True, kw_only=True)
class _Stream:
    node: str
    name: str
    file: IO[bytes]
    lines: OutputLines


class LocalNodes:
    """Starts, follows and ends nodes. A context manager: its exit kills running nodes."""

    def __init__(self, on_line: LineSink, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._on_line = on_line
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._nodes: dict[str, NodeProcess] = {}

    def __enter__(self) -> LocalNodes:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> NodeProcess:
        """Start an agent. It gets SIGTERM when this process dies for any reason."""
        tied = [sys.executable, "-IS", str(_BOUND_TO_PARENT), str(os.getpid()), *command]
        process = subprocess.Popen(
            tied,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C is forwarded by this process, once
        )
        node = self._nodes[name] = NodeProcess(name, process)
        for stream, file in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert file is not None
            os.set_blocking(file.fileno(), False)
            source = _Stream(node=name, name=stream, file=file, lines=OutputLines())
            self._selector.register(file, selectors.EVENT_READ, source)
        return node

    @property
    def nodes(self) -> tuple[NodeProcess, ...]:
        """All started nodes, in order of their start."""
        return tuple(self._nodes.values())

    @property
    def running(self) -> tuple[NodeProcess, ...]:
        return tuple(node for node in self._nodes.values() if node.exit_code is None)

    def pump(self, timeout_s: float) -> None:
        """Pass on output; returns after at most ``timeout_s``, sooner if there was output."""
        if not self._selector.get_map():
            self._clock.sleep(timeout_s)
            return
        for key, _ in self._selector.select(timeout_s):
            self._read(key.data)

    def signal(self, signum: int) -> None:
        """Send a signal to every running agent (not to workers: agents pass it on)."""
        send([node.pid for node in self.running], signum)

    def kill(self, node: NodeProcess) -> None:
        """SIGKILL all processes of a node, as a failure of its machine would."""
        kill_tree(node.pid)
        node.process.wait()

    def drain(self) -> None:
        """Pass on the remaining output of ended nodes."""
        while self._selector.get_map():
            ready = self._selector.select(0)
            if not ready:  # a process that outlived its agent holds the pipe open
                return
            for key, _ in ready:
                self._read(key.data)

    def close(self) -> None:
        """Kill running nodes and close the pipes. Idempotent."""
        for node in self.running:
            self.kill(node)
        self.drain()
        for key in list(self._selector.get_map().values()):
            self._end(key.data)
        self._selector.close()

    def _read(self, stream: _Stream) -> None:
        try:
            data = os.read(stream.file.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._end(stream)
            return
        self._emit(stream, stream.lines.feed(data, self._clock.monotonic()))

    def _end(self, stream: _Stream) -> None:
        self._selector.unregister(stream.file)
        stream.file.close()
        self._emit(stream, stream.lines.end())

    def _emit(self, stream: _Stream, lines: Sequence[str]) -> None:
        for line in lines:
            self._on_line(stream.node, stream.name, line)


# ----------------------------------------------------------------------------
# ``elastic run``: torchrun with our defaults, in this process or as several local nodes.
#
# Without ``--nodes-local`` this process *is* the agent, so that in a container SIGTERM reaches
# it. With it, this process only starts agents, passes on their output and signals, and summarizes.

_TORCHRUN = "torch.distributed.run"
_AGENT = "torch.distributed.elastic.agent.server.api"


def main(argv: Sequence[str]) -> int:
    """Run the job of this command line; returns the exit code."""
    args = parse(argv)
    names_its_run = is_ours(args.rdzv_backend) and not args.standalone
    with endpoint(args):
        if names_its_run:
            say(f"from another terminal: {while_it_runs(args.rdzv_id)}")
        announce(args)
        say(f"starting {_started(args)}: {IMPORTS}")
        code, remedy = run_local(args) if args.nodes_local else run_agent(args)
    # (Arguments that torch, an agent or etcd refuses are no run: the last line is the remedy.)
    if names_its_run and code != arguments.INTERRUPTED and is_known(args.rdzv_id):
        has_failed = code not in (arguments.DONE, Preempted.exit_code)
        more = after_its_end(args.rdzv_id, has_failed=has_failed)
        say(f"{'done' if code == arguments.DONE else describe(code)}; {more}")
        if remedy:  # again, below all that agents and workers have printed
            say(remedy)
    return code


def parser() -> argparse.ArgumentParser:
    """The command line of ``elastic run``."""
    return build_parser()


@contextlib.contextmanager
def endpoint(args: argparse.Namespace) -> Iterator[None]:
    """Start an embedded etcd if requested, and put its endpoint into ``args``."""
    if not args.embedded_etcd:
        yield
        return
    from elastic.store.embedded import EmbeddedEtcd

    with EmbeddedEtcd(data_dir=args.etcd_data) as etcd:
        args.rdzv_endpoint = etcd.endpoint
        say(f"embedded etcd at {etcd.endpoint}")
        yield


def announce(args: argparse.Namespace) -> None:
    """Print the arguments with which another node joins."""
    if not args.rdzv_id_generated or args.standalone:
        return
    where = f" --rdzv-endpoint={args.rdzv_endpoint}" if args.rdzv_endpoint else ""
    say(f"join from another node with --rdzv-id={args.rdzv_id}{where} --nnodes={args.nnodes}")


def _started(args: argparse.Namespace) -> str:
    """What starts here.

    >>> _started(argparse.Namespace(nodes_local=3, nproc_per_node="1"))
    '3 nodes with 1 worker each'
    """
    nodes, per_node = args.nodes_local or 1, str(args.nproc_per_node)
    workers = f"{per_node} worker{'' if per_node == '1' else 's'}"
    return f"1 node with {workers}" if nodes == 1 else f"{nodes} nodes with {workers} each"


def say(text: object) -> None:
    print(f"elastic: {text}", file=sys.stderr, flush=True)


# One agent: this process.


def run_agent(
    args: argparse.Namespace, tell: Callable[[ElasticError], object] | None = None
) -> tuple[int, str]:
    """Run one node of the job; returns the exit code and the remedy, after printing the reason.
    ``tell`` gets it instead, if it is an error of this package."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        _require_event_log(args)
        record(torchrun.run)(args)
    except BaseException as error:  # noqa: BLE001 (reported, and turned into the exit code)
        return _report(error, tell)
    return arguments.DONE, ""


def _require_event_log(args: argparse.Namespace) -> None:
    """Raise ConfigError for a destination of events that torch would look up as the job starts."""
    from torch.distributed.elastic.events.handlers import get_logging_handler

    try:
        get_logging_handler(args.event_log_handler)
    except KeyError:
        given = arguments.as_given("--event-log-handler", args.event_log_handler)
        raise ConfigError(
            f"{given} names no handler of events that torch has",
            hint="omit it, or use --event-log-handler=console",
        ) from None


def _report(error: BaseException, tell: Callable[[ElasticError], object] | None) -> tuple[int, str]:
    """Print why the agent ended: a message for our errors, torch's summary, tracebacks for
    bugs."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    ours = arguments.elastic_cause(error)
    if (wrong := _wrong_flag(error)) is not None:
        say(str(wrong))
        return wrong.exit_code, wrong.hint
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            say(error.code)
        elif ours is not None and tell is not None:  # otherwise it was logged
            tell(ours)
    elif ours is not None:
        (tell or say)(ours)
    elif isinstance(error, ChildFailedError):
        print(str(error).strip("\n"), file=sys.stderr, flush=True)  # torch's own table
    elif isinstance(error, SignalException | KeyboardInterrupt):
        say(str(error) or "interrupted")
    else:
        traceback.print_exception(error)
    return arguments.of_agent(error), ours.hint if ours is not None else ""


def _wrong_flag(error: BaseException) -> ConfigError | None:
    """The error of a flag whose value torch has refused, before its agent ran."""
    if not isinstance(error, ValueError | KeyError | AssertionError | OSError):
        return None
    if arguments.elastic_cause(error) is not None:
        return None
    calls = {
        (frame.f_globals.get("__name__"), frame.f_code.co_name)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    }
    if (_AGENT, "run") in calls or not any(module == _TORCHRUN for module, _ in calls):
        return None
    variables = [f"{name}={value}" for name, value in os.environ.items() if name[:4] == "PET_"]
    from_environment = f"; the environment has {', '.join(variables)}" if variables else ""
    return ConfigError(
        f"torchrun refuses the value of a flag: {type(error).__name__}: {error}",
        hint=f"`elastic run -h` lists the flags and their values{from_environment}",
    )


# Several agents: children of this process.


class StopRequest:
    """Signals from the user: the first is passed on, the second kills."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.urgent = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.urgent = self.signum is not None
        self.signum = self.signum or signum


@contextlib.contextmanager
def stop_on_signals(more: Iterable[signal.Signals] = ()) -> Iterator[StopRequest]:
    """Turn SIGINT, SIGTERM, SIGHUP and ``more`` signals into a StopRequest within the block.

    Signals ignored on entry (SIGHUP under nohup) stay ignored.
    """
    stop = StopRequest()
    handled = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *more}
    signums = [signum for signum in handled if signal.getsignal(signum) != signal.SIG_IGN]
    before = [signal.signal(signum, stop) for signum in signums]
    try:
        yield stop
    finally:
        for signum, handler in zip(signums, before, strict=True):
            signal.signal(signum, handler)


def agent_command(args: argparse.Namespace, last_error: Path) -> list[str]:
    """The command line of one agent that runs with exactly these flags, and leaves its last error
    in a file."""
    return module_command("elastic.cli.local_agent", [json.dumps(vars(args)), str(last_error)])


class LastErrors:
    """The errors with which agents have ended, each said once: all nodes of a job that has failed
    end with the same page. ``remedy`` is the hint of the last one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._said_for: dict[str, str] = {}
        self.remedy = ""

    def path(self, node: str) -> Path:
        """Where the agent of this node leaves its error."""
        return self._folder / node

    def record(self, node: str, error: ElasticError) -> None:
        """Leave the error of this node."""
        self.path(node).write_text(json.dumps({"text": str(error), "hint": error.hint}))

    def of(self, node: str) -> str:
        """What to say about the end of this node; "" if its agent has left nothing."""
        try:
            left = json.loads(self.path(node).read_text())
        except (FileNotFoundError, ValueError):  # killed, maybe while it wrote
            return ""
        text, self.remedy = left["text"], left["hint"]
        # The same page is in a file of each node.
        key = "\n".join(li for li in text.splitlines() if not li.startswith("(this page is "))
        first = self._said_for.setdefault(key, node)
        return text if first == node else f"the same as {first}"


def run_local(args: argparse.Namespace) -> tuple[int, str]:
    """Run ``args.nodes_local`` agents until the last has ended; returns exit code and remedy."""
    signals = signals_to_handle(args.signals_to_handle)
    start = SlowStart(SYSTEM_CLOCK)

    def on_line(node: str, stream: str, line: str) -> None:
        start.on_line(node, line)
        _print_line(node, stream, line)

    with (
        tempfile.TemporaryDirectory(prefix="elastic-run-") as folder,
        stop_on_signals(signals) as stop,
        LocalNodes(on_line) as nodes,
    ):
        errors = LastErrors(Path(folder))
        for index in range(args.nodes_local):
            if stop.signum is not None:
                break
            name = f"local-{index}"
            environment = {**os.environ, "ELASTIC_NODE_NAME": name}
            nodes.start(name, agent_command(args, errors.path(name)), environment)
        ended = follow(nodes, stop, min_local_nodes(args), start, errors)
        nodes.drain()
        failed = [node for node in nodes.nodes if node.name not in ended]
        codes = [code for node in failed if (code := node.exit_code) is not None]
    if stop.signum == signal.SIGINT:
        return arguments.INTERRUPTED, ""
    code = arguments.of_job(codes, success_of_one_is_enough=is_ours(args.rdzv_backend))
    return code, "" if code == arguments.DONE else errors.remedy


def min_local_nodes(args: argparse.Namespace) -> int:
    """How many nodes must run here for the job to continue; 0: others may join from elsewhere."""
    low, high = node_range(args.nnodes)
    return low if args.embedded_etcd and args.nodes_local >= high else 0


def follow(
    nodes: LocalNodes, stop: StopRequest, least: int, start: SlowStart, errors: LastErrors
) -> frozenset[str]:
    """Pass on output and signals until no agent runs. Ends the remaining agents if they are fewer
    than ``least`` and would wait for failed ones; returns their names."""
    passed_on = False
    reported: set[str] = set()
    too_few, ended = TooFew(least), frozenset[str]()
    while running := nodes.running:
        nodes.pump(CLI_POLL_S)
        if stop.signum is None and (late := start.late()):
            say(late)
        if stop.urgent:
            say(f"killing {len(running)} nodes")
            for node in running:
                nodes.kill(node)
        elif stop.signum is not None and not passed_on:
            passed_on = True
            name, again = signal.Signals(stop.signum).name, "Ctrl-C again, or a second signal,"
            counted = "the node" if len(running) == 1 else f"{len(running)} nodes"
            say(f"{name} passed on to {counted}, to leave; {again} kills at once")
            nodes.signal(stop.signum)
        _say_ended(nodes, reported, errors)
        if not ended and stop.signum is None and too_few.is_final(nodes):
            ended = frozenset(node.name for node in running)
            say(f"fewer than {least} nodes remain and none will join: ending {len(ended)}")
            nodes.signal(signal.SIGTERM)
    _say_ended(nodes, reported, errors)  # the last one may have ended since
    return ended


def _say_ended(nodes: LocalNodes, reported: set[str], errors: LastErrors) -> None:
    """Say how nodes have ended that are not in ``reported``, and add them."""
    for node in nodes.nodes:
        code = node.exit_code
        if code is None or node.name in reported:
            continue
        reported.add(node.name)
        nodes.drain()
        said = errors.of(node.name)
        if code:
            said = f"{node.name} ended with {describe(code)}{said and f': {said}'}"
        if said:
            say(said)


class SlowStart:
    """Explains silence while a job starts, once for its agents and once for their workers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._importing: str | None = "the agents"  # None: their workers have written something
        self._since_s = clock.monotonic()
        self._is_explained = False

    def on_line(self, node: str, line: str) -> None:
        """A line that a node has written: of its agent's log, or of a worker."""
        if self._importing is None:
            return
        if self._importing == "the agents":
            if " world-entered " in line:
                self.begin_workers()
        elif not re.match(rf"\S+Z [A-Z]+ +\[{re.escape(node)}( g\d+)?\] ", line):
            self.end()

    def begin_workers(self) -> None:
        """The agents have started them."""
        if self._importing == "the agents":
            self._importing, self._is_explained = "the workers", False
            self._since_s = self._clock.monotonic()

    def end(self) -> None:
        """The script runs."""
        self._importing = None

    def late(self) -> str:
        """The explanation, when it is due."""
        waited_s = self._clock.monotonic() - self._since_s
        if self._importing is None or self._is_explained or waited_s < CLI_SLOW_START_S:
            return ""
        self._is_explained = True
        return f"{self._importing} have printed nothing for {waited_s:.0f} s: {IMPORTS}"


class TooFew:
    """Detects a job that has lost nodes without which it would wait forever."""

    def __init__(self, least: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self._least = least
        self._clock = clock
        self._since_s: float | None = None

    def is_final(self, nodes: LocalNodes) -> bool:
        """Whether too few nodes have been running for some time, and none has succeeded."""
        codes = [node.exit_code for node in nodes.nodes]
        if codes.count(None) >= self._least or 0 in codes:
            self._since_s = None
            return False
        now_s = self._clock.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        return now_s - self._since_s >= CLI_TOO_FEW_S


def describe(code: int) -> str:
    """An exit code as text.

    >>> describe(-9), describe(75)
    ('SIGKILL', 'exit code 75')
    """
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _print_line(node: str, stream: str, line: str) -> None:
    file = sys.stdout if stream == "stdout" else sys.stderr
    print(wrapped(with_origin(node, node, line), file), file=file, flush=True)
