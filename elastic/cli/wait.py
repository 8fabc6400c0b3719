"""``elastic wait``: until a job is done, has committed a step, or trains on N nodes."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elastic.cli.arguments import CommandParser, add_job_arguments
from elastic.cli.view import (
    JobCondition,
    JobView,
    job_store,
    keys_of,
    read_job,
    seconds_of,
    sentence,
)
from elastic.errors import SYSTEM_CLOCK, Clock, ConfigError, StoreUnreachable
from elastic.membership.records import Done, Outcome
from elastic.telemetry.log import counted, printable
from elastic.telemetry.runs import local_runs

# Polling interval of `elastic wait`.
WAIT_LOOK_S = 0.5
# Default timeout of `elastic wait`, the same as in kubectl.
WAIT_TIMEOUT_S = 30.0

TIMED_OUT = 124  # as in timeout(1)
ENDED_OTHERWISE = 1
_CONDITION = re.compile(r"done|(step|nodes)=(\d+)")


@dataclass(frozen=True)
class WaitCondition:
    """The condition to wait for: "done", or a number of steps or nodes."""

    kind: str
    number: int = 0

    @staticmethod
    def parse(text: str) -> WaitCondition:
        """Raises ConfigError."""
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"--for={printable(text)} is not a valid condition",
                hint="give --for=done, --for=step=1000 or --for=nodes=4",
            )
        return WaitCondition(match[1] or "done", int(match[2] or 0))

    def require_possible(self, view: JobView) -> None:
        """Raise ConfigError for more nodes than the job can have."""
        limits = [node.max_nodes for node in view.nodes]
        most = view.world.max_nodes if view.world is not None else min(limits, default=self.number)
        if self.kind == "nodes" and self.number > most:
            raise ConfigError(
                f"--for=nodes={self.number}: this job has at most {counted(most, 'node')}",
                hint=f"give --for=nodes={most} or less; its maximum is that of --nnodes",
            )

    def is_met(self, view: JobView) -> bool:
        """Whether a job that has not ended meets it."""
        if self.kind == "step":
            return view.step is not None and view.step >= self.number
        return (
            self.kind == "nodes"
            and view.state is JobCondition.TRAINING
            and len(view.training) >= self.number
        )


def main(argv: Sequence[str]) -> int:
    """Run ``elastic wait ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    condition = WaitCondition.parse(args.condition)
    timeout_s = seconds_of(args.timeout, "--timeout")
    if not (args.rdzv_id or args.rdzv_endpoint):
        timeout_s -= wait_for_a_job(timeout_s, SYSTEM_CLOCK, args.run or "")
    keys = keys_of(args)
    with job_store(args) as store:
        return wait(
            lambda: read_job(store, keys, SYSTEM_CLOCK.wall()), condition, timeout_s, SYSTEM_CLOCK
        )


def wait_for_a_job(timeout_s: float, clock: Clock, name: str = "") -> float:
    """Wait for a job of this machine, which may be about to start: one with this ``name``, or any,
    where several have ended, and none of them can be meant. Returns the seconds that it took."""
    began_s = clock.monotonic()
    while (passed_s := clock.monotonic() - began_s) < timeout_s:
        runs = local_runs()
        named = not name or any(run.run_id == name for run in runs)
        if named and (name or len(runs) < 2 or any(run.is_running for run in runs)):
            break
        clock.sleep(min(WAIT_LOOK_S, timeout_s - passed_s))
    return passed_s


def wait(
    read: Callable[[], JobView], condition: WaitCondition, timeout_s: float, clock: Clock
) -> int:
    """Poll until the condition is met, the job has ended, or time is up; returns the exit code."""
    deadline_s = clock.monotonic() + timeout_s
    status = ""
    while True:
        try:
            view = read()
            status = sentence(view)
            if view.done is not None:
                return _ended(view, view.done, condition)
            condition.require_possible(view)
            if condition.is_met(view):
                print(status)
                return 0
        except StoreUnreachable as error:
            status = error.message
        if clock.monotonic() >= deadline_s:
            print(f"elastic: timed out after {timeout_s:g} s: {status}", file=sys.stderr)
            return TIMED_OUT
        clock.sleep(min(WAIT_LOOK_S, max(0.0, deadline_s - clock.monotonic())))


def _ended(view: JobView, done: Done, condition: WaitCondition) -> int:
    """The exit code once the job has ended: the condition is met now, or never will be."""
    print(sentence(view), file=sys.stdout if condition.kind == "done" else sys.stderr)
    if done.outcome is not Outcome.SUCCESS:
        return done.exit_code or ENDED_OTHERWISE
    is_met = condition.kind == "done" or condition.is_met(view)
    return 0 if is_met else ENDED_OTHERWISE


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic wait``."""
    own = CommandParser(
        prog="elastic wait",
        description="Wait until a job is done, has committed a step, or trains on N nodes or more. "
        "A job counts as training once the workers of all nodes of its newest world have begun a "
        "step. Scripts without elastic.join() report no steps: they count as training after two "
        "minutes, or with mode=restart from their start.",
        epilog="exit codes: 0 the condition holds; 124 timed out; 1 the job ended before it held; "
        "the job's exit code if it failed; 2 usage; 69 etcd unreachable at the start, or access "
        "denied",
    )
    add_job_arguments(own, environ)
    own.add_argument(
        "--for",
        dest="condition",
        required=True,
        metavar="CONDITION",
        help="the condition: done, step=N or nodes=N",
    )
    own.add_argument(
        "--timeout",
        default=f"{WAIT_TIMEOUT_S:g}s",
        metavar="TIME",
        help="give up after this time, such as 90s, 10m, 2h, 1d (default: %(default)s)",
    )
    return own
