"""``elastic run``: torchrun with our defaults, in this process or as several local nodes.

Without ``--nodes-local`` this process *is* the agent, so that in a container SIGTERM reaches
it. With it, this process only starts agents, passes on their output and signals, and summarizes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType

from elastic.child_interpreters import module_command
from elastic.cli import exit_codes
from elastic.cli.launch import flags
from elastic.cli.launch.local_nodes import LocalNodes
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import ConfigError
from elastic.tuning.agent_intervals import CLI_POLL_S, CLI_TOO_FEW_S

_TORCHRUN = "torch.distributed.run"
_AGENT = "torch.distributed.elastic.agent.server.api"


def main(argv: Sequence[str]) -> int:
    """Run the job of this command line; returns the exit code."""
    args = flags.parse(argv)
    with endpoint(args):
        announce(args)
        return run_local(args) if args.nodes_local else run_agent(args)


def parser() -> argparse.ArgumentParser:
    """The command line of ``elastic run``."""
    return flags.build_parser()


@contextlib.contextmanager
def endpoint(args: argparse.Namespace) -> Iterator[None]:
    """Start an embedded etcd if requested, and put its endpoint into ``args``."""
    if not args.embedded_etcd:
        yield
        return
    from elastic.store.embedded.etcd import EmbeddedEtcd

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


def say(text: str) -> None:
    print(f"elastic: {text}", file=sys.stderr, flush=True)


# One agent: this process.


def run_agent(args: argparse.Namespace) -> int:
    """Run one node of the job; returns the exit code, after printing the reason."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        record(torchrun.run)(args)
    except BaseException as error:  # noqa: BLE001 (reported, and turned into the exit code)
        return _report(error)
    return exit_codes.DONE


def _report(error: BaseException) -> int:
    """Print why the agent ended: a message for our errors, torch's summary, tracebacks for
    bugs."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    ours = exit_codes.elastic_cause(error)
    if (wrong := _wrong_flag(error)) is not None:
        say(str(wrong))
        return wrong.exit_code
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            say(error.code)
    elif ours is not None:
        say(str(ours))
    elif isinstance(error, ChildFailedError):
        print(str(error).strip("\n"), file=sys.stderr, flush=True)  # torch's own table
    elif isinstance(error, SignalException | KeyboardInterrupt):
        say(str(error) or "interrupted")
    else:
        traceback.print_exception(error)
    return exit_codes.of_agent(error)


def _wrong_flag(error: BaseException) -> ConfigError | None:
    """The error of a flag whose value torch has refused, before its agent ran."""
    if not isinstance(error, ValueError | KeyError | AssertionError | OSError):
        return None
    if exit_codes.elastic_cause(error) is not None:
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
def stop_on_signals(names: Sequence[str] = ()) -> Iterator[StopRequest]:
    """Turn SIGINT, SIGTERM, SIGHUP and the signals called ``names`` into a StopRequest within the
    block.

    Signals ignored on entry (SIGHUP under nohup) stay ignored.
    """
    stop = StopRequest()
    listed = {getattr(signal, name.strip(), None) for name in names}
    handled = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    handled |= {number for number in listed if isinstance(number, signal.Signals)}
    handled -= {signal.SIGKILL, signal.SIGSTOP}
    signums = [signum for signum in handled if signal.getsignal(signum) != signal.SIG_IGN]
    before = [signal.signal(signum, stop) for signum in signums]
    try:
        yield stop
    finally:
        for signum, handler in zip(signums, before, strict=True):
            signal.signal(signum, handler)


def agent_command(args: argparse.Namespace) -> list[str]:
    """The command line of one agent that runs with exactly these flags."""
    return module_command("elastic.cli.launch.local_agent", [json.dumps(vars(args))])


def run_local(args: argparse.Namespace) -> int:
    """Run ``args.nodes_local`` agents until the last has ended."""
    names = str(args.signals_to_handle).split(",")
    with stop_on_signals(names) as stop, LocalNodes(_print_line) as nodes:
        for index in range(args.nodes_local):
            if stop.signum is not None:
                break
            name = f"local-{index}"
            environment = {**os.environ, "ELASTIC_NODE_NAME": name}
            nodes.start(name, agent_command(args), environment)
        ended = follow(nodes, stop, min_local_nodes(args))
        nodes.drain()
        failed = [node for node in nodes.nodes if node.name not in ended]
        codes = [code for node in failed if (code := node.exit_code) is not None]
    if stop.signum == signal.SIGINT:
        return exit_codes.INTERRUPTED
    return exit_codes.of_job(codes, success_of_one_is_enough=flags.is_ours(args.rdzv_backend))


def min_local_nodes(args: argparse.Namespace) -> int:
    """How many nodes must run here for the job to continue; 0: others may join from elsewhere."""
    low, high = flags.node_range(args.nnodes)
    return low if args.embedded_etcd and args.nodes_local >= high else 0


def follow(nodes: LocalNodes, stop: StopRequest, least: int = 0) -> frozenset[str]:
    """Pass on output and signals until no agent runs. Ends the remaining agents if they are fewer
    than ``least`` and would wait for failed ones; returns their names."""
    passed_on = False
    reported: set[str] = set()
    too_few, ended = TooFew(least), frozenset[str]()
    while running := nodes.running:
        nodes.pump(CLI_POLL_S)
        if stop.urgent:
            say(f"killing {len(running)} nodes")
            for node in running:
                nodes.kill(node)
        elif stop.signum is not None and not passed_on:
            passed_on = True
            say(f"{signal.Signals(stop.signum).name} passed on to {len(running)} nodes")
            nodes.signal(stop.signum)
        for node in nodes.nodes:
            if node.exit_code and node.name not in reported:
                reported.add(node.name)
                say(f"{node.name} ended with {describe(node.exit_code)}")
        if not ended and stop.signum is None and too_few.is_final(nodes):
            ended = frozenset(node.name for node in running)
            say(f"fewer than {least} nodes remain and none will join: ending {len(ended)}")
            nodes.signal(signal.SIGTERM)
    return ended


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
    print(f"[{node}] {line}", file=sys.stdout if stream == "stdout" else sys.stderr, flush=True)
