"""One launch of workers: records, signals, error files, and endings."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch.distributed.elastic.multiprocessing import errors
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from elastic.agent.ending import LauncherPhase, Leaving
from elastic.agent.exporters import TorchElasticOrigin, metrics_of, otlp_export_of
from elastic.agent.health import HealthServer
from elastic.agent.identity import PortReserve, current_process, own_address
from elastic.agent.memory import host_memory
from elastic.agent.node import INSTANCE, MEMORY, JobFolder, JobSucceeded, NodeContext, RunSecret
from elastic.agent.reaper import MARK, OrphanReaper, end_strays, kill_marked
from elastic.agent.service import NodeService
from elastic.agent.tuning import WorkerTuning
from elastic.agent.workers import EXITED_IN_TRAINING_CODE
from elastic.errors import (
    SYSTEM_CLOCK,
    BudgetSpent,
    CheckpointRequired,
    Clock,
    CoordinationError,
    ElasticError,
    JobFailed,
    JoinTimeout,
    RecordError,
)
from elastic.hangs.watch import Supervised
from elastic.launcher import torch_agent
from elastic.launcher.output import KeptOutput
from elastic.launcher.scripts import RestartNotice, StartingOver, drop_signal_warnings, places
from elastic.launcher.torch_agent import (
    CallingAgent,
    Launcher,
    SupervisedWorker,
    Supervision,
    WorkerFailure,
)
from elastic.membership.records import Keys, Node, NodeState, WorldRecord
from elastic.store.etcd import EtcdStore
from elastic.telemetry.events import HealthServed, WorkerReplaced, WorkersStarting
from elastic.telemetry.journal import EventSink, Journal
from elastic.telemetry.log import LogOrigin, add_origin, get_logger, remove_origin
from elastic.telemetry.runs import (
    NO_JOURNAL,
    LocalRun,
    RunEntry,
    after_its_end,
    chosen_journal,
    default_journal,
    journal_beside,
    kept_output,
    script_in,
    while_it_runs,
)
from elastic.tracebacks import for_a_line
from elastic.tuning.environment import MODE
from elastic.tuning.intervals import (
    FINISH_WITHOUT_STORE_S,
    PEER_SILENCE,
    STORE_CALL_S,
    peer_silence_s,
)
from elastic.tuning.network import configured_address
from elastic.tuning.options import AgentOptions
from elastic.wire import base
from elastic.wire.messages import (
    CALL_JOIN,
    NO_WORLD,
    WorldIdentity,
    identity_variable,
    world_variables,
)
from elastic.wire.tls import Tls

# The node's thread is notified of a worker's death within milliseconds, but may be busy with one
# call to etcd.
REPLACEMENT_DECIDED_S = STORE_CALL_S

# ----------------------------------------------------------------------------
# The exceptions of a launch that ends without a result.
#
# torchrun ends with an exit code that a launcher of pods can act upon (docs/exit-codes.md). A
# program that calls ``elastic_launch`` gets one of torch's rendezvous errors, with ours as the
# cause: SystemExit must not end it, least of all with 0.
#
# ``torch.distributed.run.run(args)`` is called by commands (`elastic run`, `accelerate launch`)
# and by programs. It raises both: a rendezvous error that a program can catch like any other, and
# that otherwise ends the process with the exit code.

# The first match counts: subclasses come before their bases.
_KINDS: tuple[tuple[type[Exception], type[RendezvousError]], ...] = (
    (JobSucceeded, RendezvousClosedError),
    (JobFailed, RendezvousClosedError),
    (BudgetSpent, RendezvousClosedError),
    (CheckpointRequired, RendezvousClosedError),
    (JoinTimeout, RendezvousTimeoutError),
    (RecordError, RendezvousStateError),
    (CoordinationError, RendezvousConnectionError),
)


def ending(error: ElasticError | JobSucceeded, launcher: Launcher) -> RendezvousError:
    """The exception to raise ``from error``. For commands, the reason is logged here."""
    kind = next((ours for theirs, ours in _KINDS if isinstance(error, theirs)), RendezvousError)
    if launcher is Launcher.PROGRAM:
        return kind(str(error))
    is_done = isinstance(error, JobSucceeded)
    level = logging.INFO if is_done else logging.ERROR
    get_logger().log(level, "%s", error, extra={"is_last_error": not is_done})
    ended = _with_exit_code(kind)(str(error))
    assert isinstance(ended, SystemExit)
    ended.code = error.exit_code if isinstance(error, ElasticError) else 0
    return ended


def failed_without_restart(failure: WorkerFailure, store: CoordinationError) -> JobFailed:
    """The error of a node whose workers failed, and which cannot enter another world: its launcher
    must learn of the failure of the script, not of the store alone.

    >>> full = CoordinationError("etcd is full", hint="free it")
    >>> print(failed_without_restart(WorkerFailure(text=None, exit_code=3), full))
    the workers of this node failed (exit code 3), and cannot be started again: etcd is full
      free it
    """
    how = failure.text.strip() if failure.text else f"exit code {failure.exit_code}"
    return JobFailed(
        f"the workers of this node failed ({how}), and cannot be started again: {store.message}",
        hint=store.hint,
    )


def why_left(failure: BaseException | None) -> str:
    """Why a node leaves without having finished, for users.

    >>> why_left(None), why_left(OSError("no space\nbelow /tmp"))
    ('its workers ended without having joined the job', 'OSError: no space')
    """
    if failure is None:
        return "its workers ended without having joined the job"
    if isinstance(failure, KeyboardInterrupt):
        return "interrupted"
    if isinstance(failure, ChildFailedError):
        first = torch_agent.first_failure(failure)
        assert first is not None  # torch raises it for failures
        how = for_a_line(first.text.strip()) if first.text else f"exit code {first.exit_code}"
        return f"its workers failed: {_first_line(how)}"
    if isinstance(failure.__cause__, ElasticError):  # (the exception is the launcher's)
        return failure.__cause__.message[:200]
    text = _first_line(str(failure))
    return f"{type(failure).__name__}: {text}" if text else type(failure).__name__


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def _with_exit_code(kind: type[RendezvousError]) -> type[RendezvousError]:
    return type(f"{kind.__name__}WithExitCode", (kind, SystemExit), {})


# ----------------------------------------------------------------------------
# The files with which workers report the exception that ended them to torchrun's agent.


def tolerate_unreadable_error_files() -> None:
    """Make torch's agents tolerate an error file that is not JSON, here and from now on.

    A worker writes it in place: if it is killed while writing, or the disk is full, the file is
    empty or truncated.
    """
    # (torch 2.13, elastic/multiprocessing/errors: ProcessFailure.__post_init__ parses and raises.)
    torch_agent.replace_process_failure(_process_failure)


def _process_failure(
    local_rank: int, pid: int, exitcode: int, error_file: str
) -> errors.ProcessFailure:
    if os.path.isfile(error_file) and (problem := _why_unreadable(error_file)) is not None:
        get_logger().warning(
            "the error file of worker %d (pid %d) cannot be read (%r): only its exit code %d is "
            "known; %s",
            local_rank,
            pid,
            problem,
            exitcode,
            error_file,
        )
        error_file = ""  # as for a worker that has written none
    return errors.ProcessFailure(local_rank, pid, exitcode, error_file)


def _why_unreadable(error_file: str) -> Exception | None:
    """What torch's ``ProcessFailure`` would raise."""
    try:
        with open(error_file, encoding="utf-8") as file:
            written = json.load(file)
        message = written["message"]
        int(
            written.get("timestamp", 0)
            if isinstance(message, str)
            else message["extraInfo"]["timestamp"]
        )
    except Exception as problem:  # noqa: BLE001  a worker may have written anything
        return problem
    return None


# ----------------------------------------------------------------------------
# The user's files that hide modules of Python's standard library in the workers.


def hidden_modules(command: Sequence[str]) -> list[tuple[str, str]]:
    """Files beside a worker's script that hide a module of Python's standard library, each with
    that module's file.

    ``queue.py`` breaks torch's import in a script's worker, with an error that names neither. Only
    modules that this process has imported, too: other names break nothing.
    """
    first = next((argument for argument in command[1:] if argument != "-u"), None)
    if first is None:
        return []  # a function, or a program that is not Python's
    folder = "" if first == "-m" else os.path.dirname(first)
    hidden = []
    for name, module in sorted(sys.modules.items()):
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        # (Frozen modules are imported before the script's folder is on the search path.)
        if name not in sys.stdlib_module_names or origin in (None, "built-in", "frozen"):
            continue
        for own in (f"{name}.py", os.path.join(name, "__init__.py")):
            path = os.path.abspath(os.path.join(folder, own))
            if os.path.isfile(path) and not os.path.samefile(path, str(origin)):
                hidden.append((path, str(origin)))
    return hidden


# ----------------------------------------------------------------------------
# The initial record of this node, from which the other nodes decide.


def describe_node(
    parameters: RendezvousParameters,
    options: AgentOptions,
    store: EtcdStore,
    limits: tuple[int, int],
) -> Node:
    """The record of a node before its arrival: without workers or a world."""
    return Node(
        node_id=secrets.token_hex(8),
        name=os.environ.get("ELASTIC_NODE_NAME") or socket.gethostname(),
        nproc=0,
        role="",
        address=own_address(
            configured_address(parameters.local_addr, options.network),
            store.endpoint,
            within_s=options.connect_timeout_s,
        ),
        ports=(),
        liveness_port=0,
        process=current_process(options.pod_uid or ""),
        state=NodeState.ARRIVED,
        in_process=False,
        min_nodes=limits[0],
        max_nodes=limits[1],
        library=importlib.metadata.version("torch-elastic-harness"),
        torch=str(torch.__version__),
        running=None,
        arrived_for=0,
        failure=None,
        failure_exit_code=None,
        joined_at_s=SYSTEM_CLOCK.wall(),
        replica_size=options.replica_size,
    )


# ----------------------------------------------------------------------------
# Replaces a single dead worker: its siblings keep their processes and their state.
#
# torchrun supervises the workers of a node as one: it polls their processes, and if one has
# failed, it ends all others and restarts them. So each process is replaced by an object with the
# same interface that starts another process when torch polls it and it is dead: torch detects no
# failure. The node's thread decides when (:mod:`elastic.agent.workers`): in in-process
# mode only, and as long as one worker of the node has the state. The new process warms up like
# those of a joining node, and receives its world over the link.


class ReplacingNode(Protocol):
    """The interface of the node's service."""

    @property
    def is_replacing(self) -> bool: ...

    def allow_replacement(self, is_allowed: bool) -> None: ...

    def is_to_be_replaced(self, pid: int) -> bool | None: ...

    def has_failed_with_0(self, pid: int) -> bool | None: ...

    def replacement_started(self, pid: int) -> None: ...

    def replacement_ended(self, pid: int, local_rank: int, exit_code: int) -> None: ...


class Replacement:
    """One per agent; on torchrun's main thread."""

    def __init__(
        self,
        node: ReplacingNode,
        journal: EventSink,
        around_start: Callable[[], AbstractContextManager[object]],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._node = node
        self._around_start = around_start  # os.environ is that of the workers within it
        self._journal = journal
        self._clock = clock
        self._supervision: Supervision | None = None
        self._is_counted = False  # as a restart: once for workers that die together
        self._has_given_up = False  # torch has detected a failure, and ends all workers

    def look(self, supervision: Supervision | None) -> None:
        """Called with every poll of torchrun while all workers run."""
        self._supervision = supervision
        if supervision is None:
            self._node.allow_replacement(False)
            return
        self._has_given_up = False
        self._is_counted = self._is_counted and self._node.is_replacing
        for worker in supervision.workers:
            if not isinstance(worker.process, ReplaceableProcess):
                worker.supervise(
                    ReplaceableProcess(
                        worker,
                        self._decide,
                        self._start,
                        self._clock,
                        has_failed_with_0=self._node.has_failed_with_0,
                    )
                )
        self._node.allow_replacement(supervision.restarts_left > 0)

    def _decide(self, pid: int, local_rank: int, exit_code: int, waited_s: float) -> bool | None:
        """Whether a dead worker is to be replaced; None: not decided yet."""
        if self._has_given_up:
            return False
        if not waited_s:
            self._node.replacement_ended(pid, local_rank, exit_code)
        decision = self._node.is_to_be_replaced(pid)
        if decision is None and waited_s < REPLACEMENT_DECIDED_S:
            return None
        if not decision:
            self._has_given_up = True
            self._node.allow_replacement(False)
            self._count(False)  # torch counts its own restart
        return bool(decision)

    def _count(self, is_counted: bool) -> None:
        assert self._supervision is not None
        self._supervision.count_restarts(int(is_counted) - int(self._is_counted))
        self._is_counted = is_counted

    def _start(self, worker: SupervisedWorker) -> subprocess.Popen[bytes]:
        assert self._supervision is not None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(worker.error_file)  # the dead one's
        with self._around_start():
            process = subprocess.Popen(
                worker.process.args,
                env={**os.environ, **worker.environment, **_without_a_world(worker)},
                stdout=worker.stdout,
                stderr=worker.stderr,
                start_new_session=True,
            )
        self._node.replacement_started(process.pid)
        self._supervision.replaced(worker.local_rank, process.pid)
        self._count(True)
        self._journal.emit(WorkerReplaced(local_rank=worker.local_rank, pid=process.pid))
        return process


def _without_a_world(worker: SupervisedWorker) -> Mapping[str, str]:
    """Variables as for a joining node's workers, which receive their real ranks over the link."""
    size = int(worker.environment["LOCAL_WORLD_SIZE"])
    return world_variables(
        NO_WORLD,
        rank=worker.local_rank,
        size=size,
        local_size=size,
        node_rank=0,
        nodes=1,
        store_host="localhost",
        store_port=CALL_JOIN,
    )


class ReplaceableProcess:
    """A worker's current process, as torch polls it."""

    def __init__(
        self,
        worker: SupervisedWorker,
        decide: Callable[[int, int, int, float], bool | None],
        start: Callable[[SupervisedWorker], subprocess.Popen[bytes]],
        clock: Clock,
        *,
        has_failed_with_0: Callable[[int], bool | None] = lambda pid: False,
    ) -> None:
        self._worker = worker
        self._process = worker.process
        self._has_failed_with_0 = has_failed_with_0
        self._decide = decide
        self._start = start
        self._clock = clock
        self._seen_dead_s: float | None = None
        self._has_failed = False  # torch has detected it
        self._code: int | None = None  # that torch has received

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)

    def poll(self) -> int | None:
        """The exit code; None while the process runs, is replaced or may be replaced."""
        code = self._peek()
        is_unknown = code is not None and not self._has_failed
        # (Otherwise all are being ended.)
        if is_unknown and torch_agent.is_looking_for_failures(sys._getframe(1)):
            assert code is not None
            code = self._code_for_torch(code)
            if code is None or (code and self._is_replaced(code)):
                return None
            self._process.poll()
            self._has_failed, self._code = code != 0, code
        return self._process.poll() if self._code is None else self._code

    def _code_for_torch(self, code: int) -> int | None:
        """The exit code; None while it is not known whether a process that has ended with 0 has
        left others that train."""
        if code:
            return code
        has_failed = self._has_failed_with_0(self._process.pid)
        if has_failed is None and self._waited_s() < REPLACEMENT_DECIDED_S:
            return None
        return EXITED_IN_TRAINING_CODE if has_failed else 0

    def _peek(self) -> int | None:
        """The exit code of the process, which is not reaped.

        Until its end has been judged: the node's thread, which is notified at the same time, could
        not find out any more how it ended.
        """
        if self._process.returncode is not None:
            return self._process.returncode
        try:
            info = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return self._process.poll()
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def _is_replaced(self, exit_code: int) -> bool:
        """Whether the process is replaced, or that is not decided yet."""
        decision = self._decide(
            self._process.pid, self._worker.local_rank, exit_code, self._waited_s()
        )
        if decision:
            self._process.poll()
            self._process = self._start(self._worker)
            self._seen_dead_s = None
        return decision is not False

    def _waited_s(self) -> float:
        """The time since the end of the process was first seen."""
        now_s = self._clock.monotonic()
        if self._seen_dead_s is None:
            self._seen_dead_s = now_s
        return now_s - self._seen_dead_s


# ----------------------------------------------------------------------------
# The launching program's own signal handlers: replaced while a launch runs, and restored after it.
#
# While a launch runs, this package handles every signal on which torch closes (agent/ending.py). A
# signal that is ignored when the launch begins stays ignored, so that ``nohup`` protects an agent:
# torch would install its handler for it. In torchrun nothing runs after the launch; a program that
# calls ``elastic_launch`` continues, and must react to signals as before.

_Handler = Callable[[int, FrameType | None], object] | int | None


class ProgramSignals:
    """The handlers at the time of its creation. Only the main thread handles signals: on another
    thread nothing is replaced, and so nothing is saved. Raises ConfigError for a name in
    ``--signals-to-handle`` that is no signal."""

    def __init__(self) -> None:
        handled = {signal.SIGTERM, *torch_agent.handled_signals()} if _is_main_thread() else ()
        self._kept: dict[int, _Handler] = {number: signal.getsignal(number) for number in handled}
        self._names = os.environ.get(torch_agent.SIGNALS_VARIABLE)

    def handle(self, handler: Callable[[int, FrameType | None], object]) -> None:
        """Have ``handler`` called for each signal that was not ignored, and keep torch from
        installing its own. Idempotent; without effect on other threads than the main one."""
        if not _is_main_thread():
            return
        torch_agent.install_no_handlers()
        for number, kept in self._kept.items():
            if kept is not signal.SIG_IGN and signal.getsignal(number) != handler:
                signal.signal(number, handler)

    def restore(self) -> None:
        """Install the handlers again. Has no effect on other threads than the main one."""
        if not _is_main_thread():
            return
        for number, handler in self._kept.items():
            if handler is not None:  # None: not installed from Python, which cannot restore it
                signal.signal(number, handler)
        if self._names is not None:
            os.environ[torch_agent.SIGNALS_VARIABLE] = self._names
        else:
            os.environ.pop(torch_agent.SIGNALS_VARIABLE, None)

    def after_fork(self, ours: object, *, is_worker: bool) -> None:
        """In a forked child: without ``ours``, the launch's handler.

        A worker gets the handlers of a new process, so that it ends on torch's SIGTERM. Other forks
        of the program get the program's handlers.
        """
        if is_worker and callable(signal.getsignal(signal.SIGTERM)):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number, kept in self._kept.items():
            if signal.getsignal(number) is ours and kept is not None:
                signal.signal(number, _of_new_process(number) if is_worker else kept)


def _of_new_process(number: int) -> _Handler:
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


# ----------------------------------------------------------------------------
# One launch: a node of the job with all its resources, created and released together.
#
# A program may launch several times, one after the other or concurrently from several threads. So
# a launch leaves nothing in the process: the environment of the workers is set while they are
# started, under a lock, and restored afterwards; descriptors and signal handlers that a forked
# child must not have are removed from it.

_running: list[Launch] = []  # of this process
_environment = threading.RLock()  # only one launch at a time may change os.environ


@dataclasses.dataclass(frozen=True)
class JobAccess:
    """The connection of a node to its job."""

    options: AgentOptions
    keys: Keys
    store: EtcdStore
    tls: Tls | None  # between the nodes


class Launch:
    """Created at the first rendezvous: from then on torch's agent is certain to close it."""

    def __init__(
        self,
        *,
        parameters: RendezvousParameters,
        limits: tuple[int, int],
        job: JobAccess,
        launcher: Launcher,
        signals: ProgramSignals,
        agent: CallingAgent,
        exit_on_leave: Callable[[int], BaseException],
    ) -> None:
        options, keys, store, tls = job.options, job.keys, job.store, job.tls
        self._options = options
        self._launcher = launcher
        self._journal_folder = _journal_folder(store, keys)
        # `elastic run` prints them once for all its nodes.
        self._names_commands = bool(self._journal_folder) and launcher is not Launcher.RUN
        self._signals = signals
        self._runs_function = agent.runs_function
        self._start_method = agent.start_method
        self._log = get_logger()
        self._starting: int | None = None  # the thread that starts workers now
        self._health: HealthServer | None = None
        node = describe_node(parameters, options, store, limits)
        self._node_id = node.node_id
        self._ending = Path(base.make_folder("elastic-ending-")) / "notified"
        self._origin = LogOrigin(node.name)
        with contextlib.ExitStack() as created:
            created.callback(self._remove_ending)
            add_origin(self._origin)
            created.callback(remove_origin, self._origin)
            self.ports = PortReserve()
            created.callback(self.ports.close)
            node = replace(node, replica_port=self.ports.replica_port)
            self._journal = Journal(
                folder=self._journal_folder,
                identity={"node": node.name, "node_id": node.node_id},
                origin=self._origin,
                role="agent",
                run_id=keys.run_id,
                is_bounded=not os.environ.get("ELASTIC_JOURNAL"),
            )
            created.callback(self._journal.close)
            self._run = RunEntry(
                LocalRun(
                    run_id=keys.run_id,
                    journal=os.path.abspath(self._journal_folder) if self._journal_folder else "",
                    endpoint=parameters.endpoint,
                    prefix=options.prefix,
                    since_s=SYSTEM_CLOCK.wall(),
                    script=script_in(agent.command),
                    folder=os.getcwd(),
                )
            )
            created.callback(self._run.close)
            origin = TorchElasticOrigin(
                run_id=keys.run_id,
                role=agent.role,
                hostname=node.process.host,
                backend=parameters.backend,
                destination=agent.event_log_handler,
            )
            metrics, self._bridge = metrics_of(options, self._journal, origin)
            store.observe(metrics.on_etcd_call)
            secret = RunSecret.obtain(store, keys)
            services: list[NodeService] = []  # filled below: the memory must exist first
            self.memory = host_memory(
                node,
                options,
                lambda: services[0].announced_world if services else None,
                key=lambda: secret.key(MEMORY),
                tls=tls,
                on_error=lambda error: self._log.error("the memory tier died", exc_info=error),
            )
            created.callback(self.memory.close)
            context = NodeContext.of(
                self.memory.published(node),
                store=store,
                keys=keys,
                secret=secret,
                options=options,
                journal=self._journal,
                tls=tls,
            )
            context.job_folder.on_known = self._move_journal
            self.service = NodeService(
                context, last_contact_s=lambda: store.last_contact_s, metrics=metrics
            )
            services.append(self.service)
            self._output = self._kept_output(keys.run_id, node)
            if self._output is not None:
                created.callback(self._output.close)
            self.service.before_announcing(self.memory.refresh)
            self._journal.locate(self.service.position)
            created.callback(self.service.close)
            self._reaper = OrphanReaper(
                node.node_id,
                self.service.supervisor.link_path,
                self.memory.folder,
                str(self._ending),
            )
            created.callback(self._reaper.release)
            self.service.on_permission(self._reaper.permit)
            self.leaving = Leaving(
                self.service,
                options.leave_grace_s,
                lambda: kill_marked(self._node_id, self._reaper.forked),
                handle_signals=signals.handle,
                notify_workers=self.mark_final_shutdown,
                end=exit_on_leave,
            )
            created.callback(self._end_health)
            self._serve_health()
            self._otlp = otlp_export_of(self.service.readings, keys.run_id, node.name)
            if self._otlp is not None:
                created.callback(self._otlp.close)
            self.service.start()
            created.pop_all()
        self._variables: dict[str, str | None] = {
            MARK: node.node_id,
            "ELASTIC_NODE_NAME": node.name,
            "ELASTIC_MAX_NODES": str(node.max_nodes),
            "ELASTIC_REPLICA_SIZE": str(options.replica_size),
            "ELASTIC_ENDING": str(self._ending),
            "ELASTIC_NODE_MEMORY": self.memory.folder or None,
            "ELASTIC_RUN_INSTANCE": secret.key(INSTANCE).text[:22],
            "ELASTIC_LINK": self.service.supervisor.link_path,
            MODE: options.mode,
            "ELASTIC_PREFLIGHT_PASSED": "1" if options.preflight else None,
            "ELASTIC_COLLECTIVE_TIMEOUT_S": f"{options.collective_timeout_s:g}",
            "ELASTIC_TERMINATION_GRACE_S": f"{options.termination_grace_s:g}",
            PEER_SILENCE: f"{peer_silence_s(options.lease_s):g}",
        }
        with _environment:  # another launch may be starting workers, with its own variables
            environ = dict(os.environ)
        self._tuning = WorkerTuning(
            options,
            environ,
            self._journal,
            max_nodes=node.max_nodes,
            own_address=node.address,
            is_configured=bool(parameters.local_addr),
        )
        self._tuned: dict[str, str | None] = {}
        self.notice = RestartNotice(options.mode)
        drop_signal_warnings()
        self._replacement = Replacement(self.service, self._journal, self.starting_workers)
        self._starting_over = StartingOver(
            lambda: places(sys.argv[1:], Path.cwd()),
            lambda: self.service.has_first_rank and not self.service.status.workers_joined,
        )
        self._has_started_workers = False
        self._has_explained = False  # a failure, by what may have broken the workers' imports
        _running.append(self)
        self.leaving.install()
        self.service.status.watchdog.heartbeat()
        if self._names_commands:
            self._log.info("from another terminal: %s", while_it_runs(keys.run_id))
        self._warn_of_no_restarts(parameters, agent)

    # ── workers ──────────────────────────────────────────────────────────────────────────

    def set_world(self, world: WorldIdentity, peers: Sequence[str]) -> None:
        """Variables for the workers that are started next.

        ``peers``: the addresses of the other nodes, the leader's first.
        """
        self._tuned = self._tuning.variables(peers)
        self._variables |= identity_variable(world)

    @contextlib.contextmanager
    def starting_workers(self) -> Iterator[Mapping[str, str | None]]:
        """Set the workers' environment while torch starts them; no other process gets it."""
        if self._runs_function:
            # multiprocessing starts these once per program: they must not inherit our mark.
            resource_tracker.ensure_running()
            if self._start_method == "forkserver":
                forkserver.ensure_running()
        self.service.supervisor.write_link_key()
        self.memory.refresh()  # they may restore from the other nodes' memory
        if self._output is not None:
            self._output.end_lines()  # those of the processes that are replaced
        self._journal.emit(WorkersStarting(), level=logging.DEBUG)
        variables = {**self._variables, **self._tuned, "ELASTIC_JOURNAL": self._journal_folder}
        with _environment, _environment_of(variables):
            self._starting = threading.get_ident()
            try:
                yield variables
            finally:
                self._starting = None

    def _kept_output(self, run_id: str, node: Node) -> KeptOutput | None:
        """Of workers that a command starts; those of a program may be functions in its own
        processes. None: it is not kept."""
        is_command = self._launcher is not Launcher.PROGRAM and not self._runs_function
        if not is_command or os.environ.get("ELASTIC_JOURNAL") == NO_JOURNAL:
            return None
        journal = Journal(
            folder=kept_output(run_id),
            identity={"node": node.name, "node_id": node.node_id},
            role="output",
            run_id=run_id,
            is_bounded=True,
        )
        return KeptOutput(journal, self._where_workers_run) if journal.folder else None

    def _where_workers_run(self) -> tuple[int | None, int | None]:
        world = self.service.announced_world
        if world is None or self._node_id not in world.node_ids:
            return None, None
        return world.generation, world.first_rank_of(self._node_id)

    def redirect_output(self, destinations: LogsDest) -> LogsDest:
        """The destinations of the output of the workers that are started next."""
        return destinations if self._output is None else self._output.redirect(destinations)

    def _move_journal(self, checkpoints: str) -> None:
        """Continue the journal beside the job's checkpoints. On the node's thread."""

        def moved(folder: str) -> None:
            self._journal_folder = folder
            self._run.move(Path(folder))

        self._journal.move(checkpoints, moved)

    def workers_start_again(self) -> None:
        """Called before each start of workers; the first one is not a restart."""
        if self._has_started_workers:
            self._starting_over.workers_start_again()
        self._has_started_workers = True

    def look_at_workers(self, supervision: Supervision | None) -> None:
        """Called with every poll of torch's agent while all workers run."""
        self._bridge.flush()
        self._reaper.supervise()
        self._replacement.look(supervision)
        if supervision is not None:
            self.service.supervisor.supervise(
                Supervised(worker.process.pid, worker.local_rank, worker.error_file)
                for worker in supervision.workers
            )
        self.notice.look(have_joined=self.service.status.workers_joined)

    def explain_failure(self, command: Sequence[str]) -> None:
        """The workers have failed: name what may have broken their imports, once."""
        if self._has_explained or self.service.status.workers_joined:
            return
        self._has_explained = True
        for own, hidden in hidden_modules(command):
            self._log.warning(
                "%s hides the module %s of Python's standard library in the workers, whose imports "
                "may fail because of that: rename it",
                own,
                hidden,
            )

    def end_strays(self) -> None:
        """Kill processes that dead workers have left behind."""
        ended = end_strays(self._node_id, self._reaper.forked)
        if ended:
            self._log.info("ended %d processes that dead workers had left behind", ended)

    def mark_final_shutdown(self) -> None:
        """Mark torchrun's next SIGTERM to the workers as final: they may save first."""
        with contextlib.suppress(OSError):  # without the mark they end as for a restart
            self._ending.touch()

    def _remove_ending(self) -> None:
        shutil.rmtree(self._ending.parent, ignore_errors=True)

    def after_fork(self) -> None:
        """Called in a child forked by this process: a worker if the thread that starts workers
        forked it."""
        is_worker = self._starting == threading.get_ident()
        self._reaper.after_fork(is_worker=is_worker)
        self._signals.after_fork(self.leaving, is_worker=is_worker)

    # ── the end ──────────────────────────────────────────────────────────────────────────

    def end(self, failure: BaseException | None) -> None:
        """Report to the other nodes how this node ends, and release all resources."""
        self.service.status.watchdog.heartbeat()
        self.service.expect_end_of_workers()
        try:
            has_succeeded = failure is None and self.service.status.running is not None
            is_over = self.leaving.is_requested or self.service.status.done is not None
            if not (has_succeeded or is_over):
                self.service.leave(why_left(failure), failed=True)
        finally:
            self._close()

    def end_by_signal(self, signum: int) -> None:
        """The same after a signal has ended torch's agent."""
        self.service.expect_end_of_workers()
        try:
            if not self.leaving.is_requested and self.service.status.done is None:
                self.service.leave(signal.Signals(signum).name)
        finally:
            self._close()

    def finish(self) -> bool:
        """The workers have succeeded: wait for those of the other nodes. Returns whether this node
        is to run the end of the script again, because another one was lost in it. Raises an
        ElasticError if the job has failed: a launcher that sees a 0 would take it for done."""
        self.service.expect_end_of_workers()
        self.leaving.phase = LauncherPhase.FINISHING
        if self.leaving.is_requested:  # do not wait for the other nodes
            self.service.finished()
            raise self.leaving.end()
        # A parking node waits without a limit: if it ended, it would be restarted for nothing.
        patience_s = math.inf if self._options.park else FINISH_WITHOUT_STORE_S
        end = self.service.finish(patience_s=patience_s)
        if isinstance(end, WorldRecord):
            self._log.warning("this node runs the end of the script again: %s", end.reason)
            return True
        if end is None:
            self._log.warning(
                "the workers of this node succeeded, and it leaves without waiting for the other "
                "nodes: the end of the job cannot be recorded: %s",
                self.service.status.store_problem or "the thread elastic-node has ended",
            )
        else:
            self.service.status.raise_if_failed()
        self.leaving.phase = LauncherPhase.CLOSING
        return False

    def _close(self) -> None:
        self.leaving.phase = LauncherPhase.CLOSING
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._restore_signals)
            last_first.callback(remove_origin, self._origin)
            last_first.callback(self._run.close)
            if self._names_commands:
                last_first.callback(self._log.info, "%s", after_its_end(self._run.run_id))
            last_first.callback(self._journal.close)
            if self._output is not None:
                last_first.callback(self._output.close)
            last_first.callback(self._bridge.flush)
            last_first.callback(self._end_health)
            last_first.callback(self._park)
            if self._otlp is not None:
                last_first.callback(self._otlp.close)
            last_first.callback(self.memory.close)
            last_first.callback(self._forget)
            last_first.callback(self._reaper.release)
            last_first.callback(end_strays, self._node_id, self._reaper.forked)
            last_first.callback(self._remove_ending)
            last_first.callback(self.ports.close)
            last_first.callback(self.service.close)
            last_first.callback(self._starting_over.close)

    def _forget(self) -> None:
        _running.remove(self)

    def _park(self) -> None:
        if self._options.park and not self.leaving.is_requested:
            self.service.park(self.leaving)

    def _restore_signals(self) -> None:
        if self._launcher is Launcher.TORCHRUN:
            return  # the process ends now: a signal must not change its exit code
        self._signals.restore()
        if self.leaving.was_kept_from_launcher and self._launcher is Launcher.PROGRAM:
            assert self.leaving.signum is not None
            signal.raise_signal(self.leaving.signum)  # for the program's own handler

    # ── the beginning ────────────────────────────────────────────────────────────────────

    def _serve_health(self) -> None:
        if self._options.health_port is None:
            return
        self._health = HealthServer(
            self._options.health_port, self.service.probes, on_error=self.service.status.fail
        )
        self._health.start()
        self._journal.emit(HealthServed(port=self._health.port))

    def _end_health(self) -> None:
        if self._health is not None:
            self._health.close()

    def _warn_of_no_restarts(self, parameters: RendezvousParameters, agent: CallingAgent) -> None:
        if agent.max_restarts == 0 and parameters.max_nodes > 1:
            self._log.warning(
                "--max-restarts=0 with --nnodes=%d:%d: torchrun ends this node as soon as a "
                "worker fails, and when a node dies the workers of all others fail in their "
                "collectives. Set --max-restarts=1000, or launch with `elastic run`, where the "
                "failure budget ends a job that cannot succeed",
                parameters.min_nodes,
                parameters.max_nodes,
            )


def _journal_folder(store: EtcdStore, keys: Keys) -> str | None:
    """Where the journals of this run are: in ELASTIC_JOURNAL, else beside its checkpoints, else in
    the user's state folder. None: nowhere."""
    if os.environ.get("ELASTIC_JOURNAL"):
        return chosen_journal()
    checkpoints = JobFolder.known(store, keys)
    if checkpoints is not None and os.path.isdir(checkpoints):
        return str(journal_beside(checkpoints, keys.run_id))
    return str(default_journal(keys.run_id))


def _after_fork_in_child() -> None:
    global _environment
    _environment = threading.RLock()  # the thread that may hold it does not exist in the child
    for launch in _running:
        launch.after_fork()
    _running.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


@contextlib.contextmanager
def _environment_of(variables: Mapping[str, str | None]) -> Iterator[None]:
    """``os.environ`` with these variables (None: unset) within the block."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
