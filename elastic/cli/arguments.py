"""Arguments and exit codes that commands have in common."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from typing import Any, NoReturn

from elastic.errors import (
    SYSTEM_CLOCK,
    BudgetSpent,
    CheckpointRequired,
    ConfigError,
    CoordinationError,
    ElasticError,
    NodeUnfit,
    Preempted,
)
from elastic.telemetry.log import duration, printable
from elastic.telemetry.runs import LocalRun, local_runs
from elastic.tracebacks import exception_type
from elastic.tuning.options import AgentOptions, read_options

_MAX_LISTED = 10  # runs in an error
_MAX_NEAREST = 3  # names, in a question

# ----------------------------------------------------------------------------
# The parser of every command: an error is a ConfigError (exit code 2) with a hint.


class CommandParser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments here: those of a subcommand are reported by its parent in
        argparse, whose ``-h`` does not list the right ones."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            if not flag.startswith("-"):
                self.error(f"unexpected argument {unknown[0]!r}")
            known = [s for action in self._actions for s in action.option_strings]
            self.error(f"unknown flag {flag}{nearest(flag, known)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"`{self.prog} -h` lists its arguments")


def nearest(name: str, known: Iterable[str]) -> str:
    """``", did you mean 'x'?"`` or nothing: a suffix for the first clause of an error.

    >>> nearest("--nnodez", ["--nnodes", "--role"])
    ", did you mean '--nnodes'?"
    >>> nearest("job-1", ["job-12", "job-13"])
    ", did you mean 'job-12' or 'job-13'?"
    >>> nearest("--zzz", ["--nnodes"])
    ''
    """
    ranked = get_close_matches(name, list(known), n=_MAX_NEAREST)
    # Others only if they are as close as the closest.
    closeness = [SequenceMatcher(None, match, name).ratio() for match in ranked]
    matches = sorted(m for m, r in zip(ranked, closeness, strict=True) if r == closeness[0])
    return f", did you mean {' or '.join(map(repr, matches))}?" if matches else ""


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is an integer, and not less than ``least``."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return value

    return number


def add_output(
    parser: argparse.ArgumentParser,
    *choices: str,
    text: str = "output format (default: %(default)s)",
) -> None:
    """``-o``, ``--output``; the first choice is the default."""
    parser.add_argument("-o", "--output", choices=choices, default=choices[0], help=text)


# ----------------------------------------------------------------------------
# The arguments that name a job and its etcd, for every command that needs them.
#
# They are torchrun's (``--rdzv-endpoint``, ``--rdzv-id``, ``--rdzv-conf``), with torchrun's
# defaults (``PET_RDZV_*``), which are already set inside a pod of the job.


def add_job_arguments(
    parser: argparse.ArgumentParser,
    environ: Mapping[str, str] = os.environ,
    *,
    run_help: str = "run id of the job (default: PET_RDZV_ID, or the only job of this machine)",
) -> None:
    """``RUN``, ``--rdzv-endpoint``, ``--rdzv-id`` and ``--rdzv-conf``. Without ``run_help`` the
    command has no positional argument for the run."""
    if run_help:
        parser.add_argument("run", nargs="?", metavar="RUN", help=run_help)
    parser.add_argument(
        "--rdzv-id",
        default=environ.get("PET_RDZV_ID"),
        metavar="NAME",
        help="the run id, as a flag",
    )
    add_etcd_arguments(parser, environ)


def add_etcd_arguments(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] = os.environ
) -> None:
    """``--rdzv-endpoint`` and ``--rdzv-conf``, for a command about all jobs."""
    parser.add_argument(
        "--rdzv-endpoint",
        default=environ.get("PET_RDZV_ENDPOINT"),
        metavar="HOST:PORT",
        help="etcd's endpoint, in torchrun's format (default: PET_RDZV_ENDPOINT, or that of the "
        "job on this machine)",
    )
    add_options_argument(parser, environ)


def add_options_argument(
    parser: argparse.ArgumentParser, environ: Mapping[str, str] = os.environ
) -> None:
    """Add only ``--rdzv-conf``, for a command that does not connect to etcd."""
    parser.add_argument(
        "--rdzv-conf",
        default=environ.get("PET_RDZV_CONF", ""),
        metavar="KEY=VALUE,...",
        help="the agents' options, in torchrun's format: prefix, user, cacert, profile, mode, ... "
        "(default: PET_RDZV_CONF)",
    )


def options_of(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> AgentOptions:
    """The options of the job's agents: ``--rdzv-conf``, else ``ELASTIC_*``. Raises ConfigError."""
    find_job(args)
    return agent_options(args.rdzv_conf, environ)


def agent_options(conf: str, environ: Mapping[str, str] = os.environ) -> AgentOptions:
    """The options of agents that are started with this ``--rdzv-conf``. Raises ConfigError."""
    return read_options(_pairs(conf, as_given("--rdzv-conf", conf, environ)), environ)


def endpoint_of(args: argparse.Namespace) -> str:
    """etcd's endpoint. Raises ConfigError if none is known."""
    find_job(args)
    if not args.rdzv_endpoint and args.rdzv_id:
        raise unknown_run(args.rdzv_id, local_runs())
    if not args.rdzv_endpoint:
        raise ConfigError(
            "neither --rdzv-endpoint nor PET_RDZV_ENDPOINT is given",
            hint="pass --rdzv-endpoint HOST:PORT, that of the job's etcd",
        )
    return str(args.rdzv_endpoint)


def run_id_of(args: argparse.Namespace) -> str:
    """The job's run id. Raises ConfigError if none is given, and this machine does not have exactly
    one job."""
    find_job(args)
    if args.rdzv_id:
        return str(args.rdzv_id)
    runs = local_runs()
    if running := [run for run in runs if run.is_running]:
        has = f"{len(running)} jobs run on this machine: {_listed(running)}"
        raise ConfigError(has, hint="name one by its run id")
    if runs:
        has = f"no job runs on this machine; it has run {_listed(runs)}"
        raise ConfigError(has, hint="name one by its run id")
    endpoint = args.rdzv_endpoint or "HOST:PORT"
    raise ConfigError(
        "neither --rdzv-id nor PET_RDZV_ID is given, and no job has run on this machine",
        hint="for a job elsewhere give its run id and --rdzv-endpoint; "
        f"`elastic list --rdzv-endpoint {printable(endpoint, 200)}` shows the run ids",
    )


def find_job(args: argparse.Namespace, *, or_last: bool = False) -> LocalRun | None:
    """The job of this machine that the arguments mean, as in :func:`local_run`, whose run id and
    etcd are added to them."""
    args.rdzv_id = getattr(args, "run", None) or getattr(args, "rdzv_id", None)
    run = local_run(args, or_last=or_last) if "rdzv_conf" in args and "run" in args else None
    if run is not None:
        args.rdzv_id = run.run_id
        if not args.rdzv_endpoint:
            args.rdzv_endpoint = run.endpoint
            args.rdzv_conf = ",".join(filter(None, [args.rdzv_conf, f"prefix={run.prefix}"]))
    return run


def local_run(args: argparse.Namespace, *, or_last: bool = False) -> LocalRun | None:
    """The job of this machine that the arguments mean: the named one or, without a name, the only
    one that runs, or else the only one, of those that were started in the present folder if there
    are any; None: it is another machine's, or not certain. Names the job on stderr if the arguments
    do not.

    ``or_last``: if none runs, the last one, for a command that only looks back."""
    name, endpoint, runs = args.rdzv_id, args.rdzv_endpoint, local_runs()
    if name is not None:
        runs = [run for run in runs if run.run_id == name]
    if endpoint:
        runs = [run for run in runs if run.endpoint == endpoint]
    runs = _of_this_folder(runs) or runs
    certain = [run for run in runs if run.is_running] or runs
    if len(certain) != 1 and not (or_last and certain and not certain[0].is_running):
        return None
    if name is None:
        print(f"elastic: job {_described(certain[0])} (elastic list has all)", file=sys.stderr)
    return certain[0]


def _of_this_folder(runs: Sequence[LocalRun]) -> list[LocalRun]:
    here = os.getcwd()
    return [run for run in runs if run.folder == here]


def _described(run: LocalRun) -> str:
    """A job that was chosen without its name, so that nobody takes it for another one."""
    ago = f"started {duration(max(0.0, SYSTEM_CLOCK.wall() - run.since_s))} ago"
    script = f"{printable(run.script, 80)} in {printable(run.folder, 200)}, " if run.script else ""
    state = "running" if run.is_running else "ended here"
    return f"{printable(run.run_id, 80)}: {script}{state}, {ago}"


def unknown_run(name: str, runs: Sequence[LocalRun]) -> ConfigError:
    """The error for a run id that this machine does not have."""
    return ConfigError(
        f"no job {printable(name, 80)} is known on this machine"
        f"{nearest(name, [run.run_id for run in runs])}",
        hint=f"it has {_listed(runs)} (`elastic list`); for a job elsewhere pass --rdzv-endpoint"
        if runs
        else "for a job elsewhere pass --rdzv-endpoint",
    )


def _listed(runs: Sequence[LocalRun]) -> str:
    shown = ", ".join(printable(run.run_id, 80) for run in runs[:_MAX_LISTED])
    return f"{shown} and {len(runs) - _MAX_LISTED} more" if len(runs) > _MAX_LISTED else shown


def as_given(flag: str, value: str, environ: Mapping[str, str] = os.environ) -> str:
    """How a value was set, for errors: by torchrun's variable for the flag, if that has the value.

    >>> as_given("--rdzv-conf", "x", {"PET_RDZV_CONF": "x"}), as_given("--rdzv-conf", "x", {})
    ('PET_RDZV_CONF=x', '--rdzv-conf=x')
    """
    variable = f"PET_{flag.removeprefix('--').replace('-', '_').upper()}"
    return f"{variable if environ.get(variable) == value else flag}={value}"


def _pairs(text: str, given: str) -> dict[str, str]:
    """torchrun's ``key=value,key=value``. ``given``: how it was set."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    for key, equals, value in pairs:
        if not (key.strip() and equals and value.strip()):
            raise ConfigError(
                f"{given}: {key!r} is not KEY=VALUE",
                hint="for example --rdzv-conf=prefix=/elastic,mode=restart",
            )
    return {key.strip(): value.strip() for key, _, value in pairs}


# ----------------------------------------------------------------------------
# The exit code of a job.
#
# ====  =============================================
# 0     done
# 1     the script failed
# 2     usage: an option, endpoint, run id or argument is wrong
# 65    no valid checkpoint where one was required
# 69    etcd is unreachable or denies access
# 70    the failure budget is spent
# 71    this node failed its preflight
# 75    preempted: saved and left
# 130   interrupted (Ctrl-C)
# ====  =============================================

DONE = 0
FAILED = 1
INTERRUPTED = 130
SIGNALLED = 128

# The most informative code first; codes that are not listed follow, largest first.
_BY_PRIORITY = (
    ConfigError.exit_code,
    CoordinationError.exit_code,
    CheckpointRequired.exit_code,
    BudgetSpent.exit_code,
    NodeUnfit.exit_code,
    FAILED,
    Preempted.exit_code,
)


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then its causes, nearest first. Terminates on cycles, too."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def elastic_cause(error: BaseException) -> ElasticError | None:
    """The nearest error of this package in the chain: torch wraps it in its own types."""
    return next((e for e in chain(error) if isinstance(e, ElasticError)), None)


def of_agent(error: BaseException) -> int:
    """The exit code for the error that ended an agent.

    Imports torch's exception types, so call it only where torch is loaded already.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    if isinstance(error, SystemExit):
        return _of_system_exit(error)
    ours = elastic_cause(error)
    if ours is not None:
        return ours.exit_code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    for link in chain(error):
        if isinstance(link, ChildFailedError):
            lacks_state = any(map(_lacks_state, link.failures.values()))
            return CheckpointRequired.exit_code if lacks_state else FAILED
        if isinstance(link, SignalException):
            return SIGNALLED + int(link.sigval)
        if isinstance(link, RendezvousConnectionError):
            return CoordinationError.exit_code
    return FAILED


def _lacks_state(failure: Any) -> bool:
    """Whether this library has ended a worker for want of a checkpoint. A script that exits with
    the same code has failed."""
    written = failure.error_file_data.get("message", "")
    text = written.get("message") if isinstance(written, dict) else None
    is_ours = exception_type(str(text or "")) == CheckpointRequired.__name__
    return is_ours and failure.exitcode == CheckpointRequired.exit_code


def of_job(codes: Collection[int], *, success_of_one_is_enough: bool) -> int:
    """One exit code for a job from its agents' codes.

    With our rendezvous an agent exits with 0 only when the job is done, so nodes lost earlier do
    not count (``success_of_one_is_enough``). Negative codes are signals.

    >>> of_job([0, -9, 0], success_of_one_is_enough=True)
    0
    >>> of_job([0, 1], success_of_one_is_enough=False)
    1
    >>> of_job([75, 70, 1], success_of_one_is_enough=True)
    70
    """
    if DONE in codes and (success_of_one_is_enough or not any(codes)):
        return DONE
    failures = {SIGNALLED - code if code < 0 else code for code in codes} - {DONE}
    for code in _BY_PRIORITY:
        if code in failures:
            return code
    return max(failures, default=FAILED)


def _of_system_exit(error: SystemExit) -> int:
    if error.code is None:
        return DONE
    return error.code if isinstance(error.code, int) else FAILED
