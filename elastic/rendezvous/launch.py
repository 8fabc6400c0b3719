"""One launch: a node of the job with all its resources, created and released together.

A program may launch several times, one after the other or concurrently from several threads. So a
launch leaves nothing in the process: the environment of the workers is set while they are started,
under a lock, and restored afterwards; descriptors and signal handlers that a forked child must not
have are removed from it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from elastic.agent.ending.leaving import LauncherPhase, Leaving
from elastic.agent.service import NodeService
from elastic.agent.worker_tuning import WorkerTuning
from elastic.events import HealthServed, WorkersStarting
from elastic.hangs.watch import Supervised
from elastic.health.server import HealthServer
from elastic.membership.records import Keys
from elastic.messages.environment import identity_variable
from elastic.messages.world import WorldIdentity
from elastic.metrics.assembly import metrics_of, otlp_export_of
from elastic.metrics.torchelastic import TorchElasticOrigin
from elastic.node.checkpoint_memory import host_memory
from elastic.node.context import NodeContext
from elastic.node.orphan_reaper import MARK, OrphanReaper, end_strays, kill_marked
from elastic.node.ports import PortReserve
from elastic.node.run_secret import INSTANCE, MEMORY, RunSecret
from elastic.rendezvous.endings import why_left
from elastic.rendezvous.node_record import describe_node
from elastic.rendezvous.replacement import Replacement
from elastic.rendezvous.scripts.restart_notice import RestartNotice, drop_signal_warnings
from elastic.rendezvous.scripts.starting_over import StartingOver, places
from elastic.rendezvous.signals import ProgramSignals
from elastic.rendezvous.torch_private import CallingAgent, Launcher, Supervision
from elastic.secure_channel import private_files
from elastic.secure_channel.tls import Tls
from elastic.store.etcd.store import EtcdStore
from elastic.telemetry.journal import Journal
from elastic.telemetry.log import LogOrigin, add_origin, get_logger, remove_origin
from elastic.tuning.agent_intervals import FINISH_WITHOUT_STORE_S
from elastic.tuning.agent_options import AgentOptions
from elastic.tuning.timeouts import PEER_SILENCE, peer_silence_s

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
        self._signals = signals
        self._runs_function = agent.runs_function
        self._start_method = agent.start_method
        self._log = get_logger()
        self._starting: int | None = None  # the thread that starts workers now
        self._health: HealthServer | None = None
        node = describe_node(parameters, options, store, limits)
        self._node_id = node.node_id
        self._ending = Path(private_files.make_folder("elastic-ending-")) / "told"
        self._origin = LogOrigin(node.name)
        with contextlib.ExitStack() as created:
            created.callback(self._remove_ending)
            add_origin(self._origin)
            created.callback(remove_origin, self._origin)
            self.ports = PortReserve()
            created.callback(self.ports.close)
            node = replace(node, replica_port=self.ports.replica_port)
            self._journal = Journal(
                folder=os.environ.get("ELASTIC_JOURNAL"),
                identity={"node": node.name, "node_id": node.node_id},
                origin=self._origin,
                role="agent",
                run_id=keys.run_id,
            )
            created.callback(self._journal.close)
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
                self._journal,
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
            self.service = NodeService(
                context, last_contact_s=lambda: store.last_contact_s, metrics=metrics
            )
            services.append(self.service)
            self.service.before_announcing(self.memory.refresh)
            self._journal.locate(self.service.position)
            created.callback(self.service.close)
            self._reaper = OrphanReaper(
                node.node_id, self.service.link_path, self.memory.folder, str(self._ending)
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
            "ELASTIC_LINK": self.service.link_path or None,
            "ELASTIC_PREFLIGHT_PASSED": "1" if options.preflight else None,
            "ELASTIC_COLLECTIVE_TIMEOUT_S": f"{options.collective_timeout_s:g}",
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
            is_configured=bool(parameters.local_addr or options.pod_ip),
        )
        self._tuned: dict[str, str | None] = {}
        self.notice = RestartNotice(options.mode)
        drop_signal_warnings()
        self._replacement = Replacement(self.service, self._journal, self.starting_workers)
        self._starting_over = StartingOver(
            lambda: places(sys.argv[1:], Path.cwd()),
            lambda: self.service.has_first_rank and not self.service.workers_have_joined,
        )
        self._has_started_workers = False
        _running.append(self)
        self.leaving.install()
        self.service.heartbeat()
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
        self.service.write_link_key()
        self.memory.refresh()  # they may restore from the other nodes' memory
        self._journal.emit(WorkersStarting(), level=logging.DEBUG)
        variables = {**self._variables, **self._tuned}
        with _environment, _environment_of(variables):
            self._starting = threading.get_ident()
            try:
                yield variables
            finally:
                self._starting = None

    def workers_start_again(self) -> None:
        """Called before each start of workers; the first one is not a restart."""
        if self._has_started_workers:
            self._starting_over.workers_start_again()
        self._has_started_workers = True

    def look_at_workers(self, supervision: Supervision | None) -> None:
        """Called with every poll of torch's agent while all workers run."""
        self._bridge.flush()
        if self.service.link_path:
            self._replacement.look(supervision)
        if supervision is not None:
            self.service.supervise(
                Supervised(worker.process.pid, worker.local_rank, worker.error_file)
                for worker in supervision.workers
            )
        self.notice.look(have_joined=self.service.workers_have_joined)

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
        self.service.heartbeat()
        self.service.expect_end_of_workers()
        try:
            if failure is None and self.service.running is not None:
                self._finish()
            elif not self.leaving.is_requested and self.service.done is None:
                self.service.leave(why_left(failure), failed=True)
        finally:
            self._close()

    def end_by_signal(self, signum: int) -> None:
        """The same after a signal has ended torch's agent."""
        self.service.expect_end_of_workers()
        try:
            if not self.leaving.is_requested and self.service.done is None:
                self.service.leave(signal.Signals(signum).name)
        finally:
            self._close()

    def _finish(self) -> None:
        self.leaving.phase = LauncherPhase.FINISHING
        if self.leaving.is_requested:  # do not wait for the other nodes
            self.service.finished()
            raise self.leaving.end()
        # A parking node waits without a limit: if it ended, it would be restarted for nothing.
        patience_s = math.inf if self._options.park else FINISH_WITHOUT_STORE_S
        if self.service.finish(patience_s=patience_s) is None:
            self._log.warning(
                "the workers of this node succeeded, and it leaves without waiting for the other "
                "nodes: the end of the job cannot be recorded: %s",
                self.service.store_problem or "the thread elastic-node has ended",
            )

    def _close(self) -> None:
        self.leaving.phase = LauncherPhase.CLOSING
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._restore_signals)
            last_first.callback(remove_origin, self._origin)
            last_first.callback(self._journal.close)
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
            self._options.health_port, self.service.probes, on_error=self.service.fail
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
