"""The private names of torchrun's agent, and workers that are functions."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from types import FrameType
from typing import IO, Any

import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.multiprocessing import errors
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.utils import store as store_util

from elastic import torch_private
from elastic.errors import ConfigError
from elastic.membership.failures import is_consequence
from elastic.membership.records import Member
from elastic.telemetry.log import get_logger
from elastic.tracebacks import exception_of, shorten, with_module
from elastic.tuning.options import signals_to_handle

# ----------------------------------------------------------------------------
# A worker's function, for processes that do not inherit the agent's environment.
#
# It is unpickled in the worker: nothing else may be imported here.


class FunctionInEnvironment:
    """``function``, called with these variables in ``os.environ`` (None: unset)."""

    def __init__(self, function: Callable[..., Any], variables: Mapping[str, str | None]) -> None:
        functools.update_wrapper(self, function)  # torch shows its name
        self._function = function
        self._variables = dict(variables)

    def __call__(self, *args: Any) -> Any:
        for name, value in self._variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        return self._function(*args)


# ----------------------------------------------------------------------------
# Every private name of torch that this package uses, and nothing else.
#
# Only of ``torch/distributed/elastic``: the names that workers use are in
# :mod:`elastic.torch_private`. The contract test
# ``tests/contract/test_torch_private.py`` fails where a torch version differs, and :func:`check`,
# which the handler calls first, names what is missing.
#
# - the handler registry's dictionary, to replace the backend ``etcd`` (in launcher/entrypoint.py,
# which
#   must import nothing heavy);
# - the agent that calls ``next_rendezvous``, found on the call stack: the rendezvous interface
#   provides neither the number of workers nor how the last ones ended;
# - its ``_start_workers`` and ``_shutdown``, replaced on that one instance: the environment of the
#   workers is set only while they are started, and a launch that a signal ends is closed, too
#   (``launch_agent`` does not call ``shutdown`` then);
# - its ``_monitor_workers``, replaced likewise, and ``_restart_workers``: workers that have
#   succeeded may be started again, to run the end of the script for a node that was lost in it;
# - its ``_logs_specs``, replaced likewise: the destinations of the workers' output;
# - ``torch.distributed.run`` on the call stack: torchrun gets exit codes, a program exceptions;
# - the keys that ``_assign_worker_ranks`` and the exit barrier use in their store. Prefilled in a
#   private in-process store, no peer can fail rank assignment or delay the exit;
# - the environment variable by which torch decides which signals it handles: none;
# - the class ``ProcessFailure`` where its supervision of processes looks it up, which raises for
#   an error file that it cannot parse;
# - the processes that a ``SubprocessContext`` supervises, and how it looks for failed ones: so
#   that one of them can be replaced while the others live.

SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
SIGNALS_BY_DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_TORCHRUN = os.path.join("torch", "distributed", "run.py")
_RECORD = os.path.join("multiprocessing", "errors", "__init__.py")
_ROLE_INFO = "torchelastic/role_info/"
_ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
_EXIT_BARRIER_MEMBERS = "torchelastic/agent/terminal_state/num_members"


@dataclass(frozen=True)
class WorkerFailure:
    """How a node's workers ended."""

    text: str | None  # the exception and its place, where the worker wrote torch's error file
    exit_code: int | None


@dataclass(frozen=True)
class CallingAgent:
    """The properties of the torchrun agent that calls the handler."""

    nproc: int
    role: str
    max_restarts: int
    failure: WorkerFailure | None
    runs_function: bool  # the workers are processes of multiprocessing, not of a command
    start_method: str  # of multiprocessing
    event_log_handler: str  # name of the handler that its events go to
    command: tuple[str, ...] = ()  # of a worker, which is no function


# The agent's attributes before its first rendezvous, by the class that defines them.
_OF_AGENTS = (
    "_assign_worker_ranks",
    "_exit_barrier",
    "_invoke_run",
    "_monitor_workers",
    "_rendezvous",
    "_restart_workers",
    "_shutdown",
    "_start_workers",
)


def check() -> None:
    """Raise a ConfigError that lists the names missing in the installed torch; warn about an
    untested one."""
    missing = [f"LocalElasticAgent.{n}" for n in _OF_AGENTS if not hasattr(LocalElasticAgent, n)]
    barrier = (
        getattr(api, "_TERMINAL_STATE_SYNC_ID", None),
        getattr(store_util, "_NUM_MEMBERS", None),
    )
    if "".join(map(str, barrier)) != _EXIT_BARRIER_MEMBERS:
        missing.append(f"the exit barrier's key {_EXIT_BARRIER_MEMBERS}")
    if missing:
        raise _differs(", ".join(missing))
    if not torch_private.is_supported(torch.__version__):
        get_logger().warning(
            "torch %s was never tested with this version of torch-elastic-harness, which supports "
            "%s",
            torch.__version__,
            torch_private.SUPPORTED,
        )


class Launcher(Enum):
    """What launched this agent: a command gets exit codes, a program exceptions."""

    TORCHRUN = "torchrun"  # this process is torchrun: exit codes
    RUN = "torch.distributed.run.run()"  # `elastic run`, `accelerate launch`, or a program
    PROGRAM = "elastic_launch()"  # results and exceptions


def launcher() -> Launcher:
    """What launched the agent that is being created on this thread."""
    kind = Launcher.PROGRAM
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_TORCHRUN):
            if frame.f_code.co_name == "run":
                kind = Launcher.RUN
            elif frame.f_code.co_name == "main" and kind is Launcher.RUN:
                return Launcher.PROGRAM if _was_given_arguments(frame) else Launcher.TORCHRUN
        frame = frame.f_back
    return kind


def _was_given_arguments(main: FrameType) -> bool:
    """Whether ``torch.distributed.run.main`` was called with explicit arguments."""
    record = main.f_back  # its decorator (main itself has overwritten its arguments)
    if record is None or not record.f_code.co_filename.endswith(_RECORD):
        return False
    return bool(record.f_locals.get("args") or record.f_locals.get("kwargs"))


def signal_exception(signum: int) -> SignalException:
    """The exception that torch raises in a program whose launch is ended by a signal."""
    return SignalException(f"Process {os.getpid()} got signal: {signum}", signal.Signals(signum))


def install_no_handlers() -> None:
    """Have torch's next ``PContext.start`` keep all handlers of signals."""
    os.environ[SIGNALS_VARIABLE] = ""


def handled_signals() -> frozenset[signal.Signals]:
    """The signals for which torch installs handlers that it never removes.

    Raises ConfigError for a name that is no signal.
    """
    # (Empty: this process was started by an agent, in which torch handles none.)
    return signals_to_handle(os.environ.get(SIGNALS_VARIABLE) or SIGNALS_BY_DEFAULT)


def calling_agent() -> CallingAgent:
    """The agent on this thread's call stack.

    Raises:
        ConfigError: ``next_rendezvous`` was not called by torchrun's agent, or by one whose
            internals this module does not know.
    """
    agent, run_result = _find_agent()
    return _describe(agent, run_result)


def attach(
    *,
    around_start: Callable[[], AbstractContextManager[Mapping[str, str | None]]],
    on_signal: Callable[[SignalException], object],
    redirect: Callable[[LogsDest], LogsDest],
    on_success: Callable[[], bool],
) -> None:
    """Have the agent on this thread's call stack start workers inside ``around_start()``, which
    returns its settings of ``os.environ``, with the destinations of their output that ``redirect``
    returns, call ``on_signal`` when a signal has ended its run, after its workers, and
    ``on_success`` when these have succeeded: it returns whether they are to be started again.

    Raises:
        ConfigError: like :func:`calling_agent`.
    """
    agent, _ = _find_agent()
    try:
        start_workers, shut_down = agent._start_workers, agent._shutdown
        monitor_workers = agent._monitor_workers
        spec, logs = agent._worker_group.spec, agent._logs_specs
    except AttributeError as error:
        raise _differs(str(error)) from error

    def start_inside(*args: Any, **kwargs: Any) -> Any:
        with around_start() as environment:
            if agent._start_method != "forkserver" or not callable(spec.entrypoint):
                return start_workers(*args, **kwargs)
            # Forked by a process that has the environment of the program's first such launch.
            function = spec.entrypoint
            spec.entrypoint = FunctionInEnvironment(function, environment)
            try:
                return start_workers(*args, **kwargs)
            finally:
                spec.entrypoint = function

    def shut_down_and_notify(*args: Any, **kwargs: Any) -> None:
        ended_by = sys.exc_info()[1]
        try:
            if isinstance(ended_by, SignalException):
                # Workers save on SIGTERM; Ctrl-C would interrupt them in the middle of a step.
                args = (signal.SIGTERM, *args[1:])
            shut_down(*args, **kwargs)
        finally:
            if isinstance(ended_by, SignalException) and ended_by is not outer:
                on_signal(ended_by)

    def monitor_until_all_succeed(group: Any) -> Any:
        result = monitor_workers(group)
        if result.state is not api.WorkerState.SUCCEEDED or not on_success():
            return result
        agent._restart_workers(group)
        return api.RunResult(state=api.WorkerState.HEALTHY)

    outer = sys.exc_info()[1]  # an exception that the program handles while it launches
    agent._start_workers, agent._shutdown = start_inside, shut_down_and_notify
    agent._monitor_workers = monitor_until_all_succeed
    agent._logs_specs = _RedirectedLogs(logs, redirect)


class _RedirectedLogs(LogsSpecs):
    """The destinations of ``logs``, changed."""

    def __init__(self, logs: LogsSpecs, redirect: Callable[[LogsDest], LogsDest]) -> None:
        self._logs = logs
        self._redirect = redirect

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return self._redirect(self._logs.reify(envs))

    @property
    def root_log_dir(self) -> str:
        return self._logs.root_log_dir


def _find_agent() -> tuple[Any, Any]:
    """The agent, and the result of its last workers."""
    frame: FrameType | None = sys._getframe(1)
    agent: Any = None
    failures: Any = None
    while frame is not None:
        name = frame.f_code.co_name
        if name == "_rendezvous" and "worker_group" in frame.f_locals:
            agent = frame.f_locals.get("self")
        if name == "_invoke_run" and frame.f_locals.get("self") is agent and agent is not None:
            failures = frame.f_locals.get("run_result")
            break
        frame = frame.f_back
    if agent is None:
        raise ConfigError(
            "next_rendezvous() was not called by torchrun's agent",
            hint="launch with torchrun, `elastic run` or torch.distributed.launcher; "
            f"torch {torch.__version__} may also differ from the versions this was built for "
            f"({torch_private.SUPPORTED})",
        )
    return agent, failures


def _describe(agent: Any, run_result: Any) -> CallingAgent:
    try:
        spec = agent._worker_group.spec
        return CallingAgent(
            nproc=int(spec.local_world_size),
            role=str(spec.role),
            max_restarts=int(spec.max_restarts),
            failure=first_failure(run_result),
            runs_function=callable(spec.entrypoint),
            start_method=str(agent._start_method),
            event_log_handler=str(spec.event_log_handler),
            command=() if callable(spec.entrypoint) else (spec.entrypoint, *map(str, spec.args)),
        )
    except AttributeError as error:
        raise _differs(str(error)) from error


def first_failure(run_result: Any) -> WorkerFailure | None:
    """The failure that came first among those of a result of torchrun's agent, or of its
    ``ChildFailedError``."""
    failures = list(getattr(run_result, "failures", {}).values())
    if not failures:
        return None
    in_order = sorted(failures, key=lambda failure: int(failure.timestamp))
    reports = [WorkerFailure(text=_error_of(f), exit_code=int(f.exitcode)) for f in in_order]
    # Timestamps are in seconds: several workers may fail in one, most because of the first.
    return next((r for r in reports if not is_consequence(r.text)), reports[0])


def _error_of(failure: Any) -> str | None:
    written = failure.error_file_data.get("message", "")
    if not isinstance(written, dict):
        return None
    trace = str((written.get("extraInfo") or {}).get("py_callstack") or "")
    frames = trace[: trace.rfind(exception_of(trace))] if trace else ""
    return shorten(frames + with_module(str(written.get("message", "")), trace)) or None


@dataclass(frozen=True)
class SupervisedWorker:
    """A process that torchrun supervises for a local rank."""

    local_rank: int
    process: subprocess.Popen[bytes]
    environment: Mapping[str, str]  # beyond the agent's own
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None
    error_file: str
    handler: Any

    def supervise(self, process: object) -> None:
        """Have torchrun supervise this object, which behaves like a Popen, from now on."""
        self.handler.proc = process


@dataclass(frozen=True)
class Supervision:
    """The monitoring agent's view of its workers."""

    workers: tuple[SupervisedWorker, ...]
    restarts_left: int
    agent: Any

    def replaced(self, local_rank: int, pid: int) -> None:
        """Record that a process replaced another one."""
        # The agent compares the pids with those that it polls, and ends if they differ.
        self.agent._worker_group.workers[local_rank].id = pid

    def count_restarts(self, number: int) -> None:
        """Decrement the remaining ``--max-restarts`` by this number."""
        self.agent._remaining_restarts -= number


def supervision() -> Supervision | None:
    """The supervision by the agent on this thread's call stack; None if its workers do not run a
    command line or its internals are unknown: then it restarts all of them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_invoke_run":
        frame = frame.f_back
    agent = frame.f_locals.get("self") if frame is not None else None
    try:
        context: Any = agent._pcontext  # type: ignore[union-attr]
        handlers = context.subprocess_handlers
        workers = tuple(
            SupervisedWorker(
                local_rank=local_rank,
                process=handler.proc,
                environment=context.envs[local_rank],
                stdout=handler._stdout,
                stderr=handler._stderr,
                error_file=context.error_files[local_rank],
                handler=handler,
            )
            for local_rank, handler in handlers.items()
        )
        return Supervision(workers, int(agent._remaining_restarts), agent)  # type: ignore[union-attr]
    except AttributeError:
        return None


def replace_process_failure(
    make: Callable[[int, int, int, str], errors.ProcessFailure],
) -> None:
    """Have torch's agents create the record of a failed process with ``make``, from its local rank,
    pid, exit code and the path of its error file."""
    # torch reads the name in this module whenever a process has failed.
    vars(multiprocessing_api)["ProcessFailure"] = make


def is_looking_for_failures(frame: FrameType) -> bool:
    """Whether torch polls a process, in ``frame``, to find failed ones."""
    return frame.f_code.co_name == "_capture_process_failures"


def private_store(members: Sequence[Member]) -> HashStore:
    """A store local to this process, filled with the values that the peers would have written."""
    store = HashStore()
    size, role_sizes = sum(m.nproc for m in members), dict[str, int]()
    for member in members:
        role_sizes[member.role] = role_sizes.get(member.role, 0) + member.nproc
    rank, role_ranks = 0, dict.fromkeys(role_sizes, 0)
    for index, member in enumerate(members):
        role = {"role": member.role, "rank": index, "local_world_size": member.nproc}
        store.set(f"{_ROLE_INFO}{index}", json.dumps(role))
        ranks = [rank, size, role_ranks[member.role], role_sizes[member.role]]
        store.set(f"{_ASSIGNED_RANKS}{index}", json.dumps(ranks))
        rank += member.nproc
        role_ranks[member.role] += member.nproc
    if len(members) > 1:
        store.add(_EXIT_BARRIER_MEMBERS, len(members) - 1)
    return store


def _differs(what: str) -> ConfigError:
    return torch_private.lacks(torch.__version__, what, "the rendezvous handler")
