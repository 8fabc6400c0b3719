"""torch's rendezvous handler on etcd v3, which torchrun calls.

Every method runs on the launching thread, torchrun's main thread; the resources of a launch are in
:class:`~elastic.launcher.launch.Launch`, the protocol itself in
:class:`~elastic.agent.service.NodeService`. The contract with torch is described in
docs/explanation/protocol.md, section 7.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import weakref
from collections.abc import Callable
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from elastic.agent import tuning
from elastic.agent.ending import LauncherPhase, preemption_exit
from elastic.agent.identity import is_loopback
from elastic.agent.node import JobSucceeded, node_tls
from elastic.doctor.checks import Status
from elastic.errors import (
    SYSTEM_CLOCK,
    ConfigError,
    ElasticError,
    JobFailed,
    NodeUnfit,
    StoreFull,
)
from elastic.launcher import torch_agent
from elastic.launcher.launch import (
    JobAccess,
    Launch,
    ProgramSignals,
    ending,
    failed_without_restart,
    tolerate_unreadable_error_files,
)
from elastic.launcher.torch_agent import Launcher, WorkerFailure
from elastic.membership.budget import FAILED_STARTS_S, FailedStarts, Failure, error_line
from elastic.membership.records import Keys, Node
from elastic.membership.replicas import require_whole_replicas
from elastic.store.client import etcd_config
from elastic.store.etcd import EtcdStore
from elastic.telemetry.log import get_logger
from elastic.tracebacks import exception_of
from elastic.tuning.options import AgentOptions, read_options
from elastic.wire.messages import CALL_JOIN, NO_WORLD, nodes_per_replica

# torchrun's run id of a job without one.
NO_RUN_ID = "none"


def create(
    parameters: RendezvousParameters, launcher: Launcher, signals: ProgramSignals
) -> EtcdRendezvousHandler:
    """Check the options and connect to etcd; nothing is written before the first rendezvous.

    Raises:
        ConfigError: an option, endpoint, certificate or run id is wrong, or torch lacks a private
            name.
        CoordinationError: etcd cannot be used.
        NodeUnfit: the preflight is enabled, and this node failed it.
    """
    torch_agent.check()
    tolerate_unreadable_error_files()
    is_program = launcher is Launcher.PROGRAM
    options = read_options(parameters.config, os.environ, for_program=is_program)
    run_id = _run_id(parameters)
    tuning.check(options, os.environ, max_nodes=parameters.max_nodes)
    tls = node_tls(options)
    config = etcd_config(parameters.endpoint, options)
    is_etcd_local = all(is_loopback(endpoint.host) for endpoint in config.endpoints)
    keys = Keys.of(options.prefix, run_id, is_etcd_local=is_etcd_local)
    launches: list[Launch] = []  # filled later: the store must exist first

    def on_crash(thread: str, error: BaseException) -> None:
        get_logger().error("the thread %s died", thread, exc_info=error)
        for launch in launches:
            launch.service.status.fail(error)

    store = EtcdStore(config, on_crash=on_crash)
    if options.preflight:
        try:
            _require_fit(parameters, options, keys, store)
        except BaseException:
            store.close()
            raise
    handler = EtcdRendezvousHandler(
        parameters, run_id, JobAccess(options, keys, store, tls), launcher, signals, launches
    )
    # torch may fail before it uses the handler, and does not close it then.
    weakref.finalize(handler, store.close).atexit = False
    return handler


def _require_fit(
    parameters: RendezvousParameters, options: AgentOptions, keys: Keys, store: EtcdStore
) -> None:
    """Check this node before it registers. Raises NodeUnfit."""
    from elastic.doctor.network import preflight, require_fit  # imported only if it is enabled

    log, began = get_logger(), SYSTEM_CLOCK.monotonic()
    findings = preflight(
        store, keys, options, endpoint=store.endpoint, local_addr=parameters.local_addr or ""
    )
    for finding in findings:
        if finding.status is Status.WARNING:
            log.warning("preflight: %s: %s; %s", finding.name, finding.measured, finding.remedy)
    require_fit(findings, os.environ.get("ELASTIC_NODE_NAME") or socket.gethostname())
    log.info("preflight: passed in %.1f s", SYSTEM_CLOCK.monotonic() - began)


def _require_passed_preflight(failure: torch_agent.WorkerFailure | None) -> None:
    """Raise NodeUnfit if a worker failed its preflight (``join(preflight=True)``): it never joined,
    so its node ends as if the agent had checked it, and no other node counts a failure."""
    if failure is None or failure.exit_code != NodeUnfit.exit_code:
        return
    kind, _, reason = exception_of(failure.text or "").partition(": ")
    if kind == NodeUnfit.__name__:
        raise NodeUnfit(reason)


def exit_on_signal(launcher: Launcher) -> Callable[[int], BaseException]:
    """Creates the exception that ends a launch whose node was asked to leave by a signal."""
    return torch_agent.signal_exception if launcher is Launcher.PROGRAM else preemption_exit


def _run_id(parameters: RendezvousParameters) -> str:
    """The id of the job; a new one for a job of one node without an id."""
    if parameters.run_id != NO_RUN_ID:
        return parameters.run_id
    if parameters.max_nodes > 1:
        raise ConfigError(
            f"no run id: every job without one is called {NO_RUN_ID!r}, and would share its nodes "
            "and its end with all others",
            hint="give all nodes of this job the same new name: torchrun --rdzv-id=NAME "
            "(or PET_RDZV_ID=NAME), in Python LaunchConfig(run_id=NAME)",
        )
    run_id = f"job-{secrets.token_hex(6)}"
    get_logger().info("no run id was given: this job of one node is called %s", run_id)
    return run_id


class EtcdRendezvousHandler(RendezvousHandler):
    """One node's rendezvous; created once per launch."""

    def __init__(
        self,
        parameters: RendezvousParameters,
        run_id: str,
        job: JobAccess,
        launcher: Launcher,
        signals: ProgramSignals,
        launches: list[Launch],
    ) -> None:
        self._parameters = parameters
        self._run_id = run_id
        self._job = job
        self._launcher = launcher
        self._signals = signals
        self._launches = launches  # none before the first rendezvous, then one
        self._failed_starts = FailedStarts()
        self._handled_outside = sys.exc_info()[1]  # a program may launch in its except clause
        self._closed = False

    # ── torch's interface ────────────────────────────────────────────────────────────────

    def get_backend(self) -> str:
        """The configured name: ``etcd-v3``, or ``etcd`` if that is replaced."""
        return self._parameters.backend

    @property
    def use_agent_store(self) -> bool:
        """False: torch prefixes an agent's store with a count that differs between agents."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Arrive, wait for a world with this node, and return it to torch.

        Raises:
            RendezvousError: for a program; a command ends with an exit code.
        """
        try:
            return self._next_rendezvous()
        except (ElasticError, JobSucceeded) as error:
            self._end(error)

    def _next_rendezvous(self) -> RendezvousInfo:
        agent = torch_agent.calling_agent()
        launch = self._launches[0] if self._launches else self._begin(agent)
        launch.leaving.phase = LauncherPhase.WAITING
        if launch.leaving.is_requested:
            launch.leaving.end_if_left()
        launch.end_strays()
        began = SYSTEM_CLOCK.monotonic()
        failure = agent.failure
        _require_passed_preflight(failure)
        if failure is not None:
            launch.explain_failure(agent.command)
            self._require_that_a_start_may_help(failure, launch.service.status.node)
        try:
            launch.service.arrive(
                nproc=agent.nproc,
                role=agent.role,
                ports=launch.ports.ports,
                failure=failure.text if failure else None,
                failure_exit_code=failure.exit_code if failure else None,
            )
            world = launch.service.world_wait.run()
        except StoreFull as full:
            if failure is None:
                raise
            raise failed_without_restart(failure, full) from full
        launch.leaving.phase = LauncherPhase.STARTING
        launch.workers_start_again()
        if world is None:
            return self._warm_up(launch)
        peers = launch.service.peer_addresses(world)
        launch.set_world(world, peers)
        launch.service.enter(world, waited_s=SYSTEM_CLOCK.monotonic() - began)
        launch.memory.refresh()
        launch.notice.workers_start(is_first_node=launch.service.has_first_rank)
        node_id = launch.service.node_id
        return RendezvousInfo(
            torch_agent.private_store(world.members),
            world.node_ids.index(node_id),
            len(world.members),
            RendezvousStoreInfo(world.store_host, world.store_port),
        )

    def _require_that_a_start_may_help(self, failed: WorkerFailure, node: Node) -> None:
        """Raise JobFailed if the workers fail again and again before they are in any world."""
        if node.running is not None:
            self._failed_starts.clear()
            return
        failure = Failure(node.name, failed.text, failed.exit_code)
        if self._failed_starts.failed(failure, SYSTEM_CLOCK.monotonic()):
            raise JobFailed(
                f"for {FAILED_STARTS_S:g} s, the workers of {node.name} have failed in the same "
                f"way before they had joined the job: {error_line(failure)}",
                hint="the job goes on without this node; mend what differs on it from the others, "
                "and start it again",
            )

    def _begin(self, agent: torch_agent.CallingAgent) -> Launch:
        """Create the launch. From now on torch's agent runs and is certain to close it."""
        limits = self._limits(agent)
        launch = Launch(
            parameters=self._parameters,
            limits=limits,
            job=self._job,
            launcher=self._launcher,
            signals=self._signals,
            agent=agent,
            exit_on_leave=exit_on_signal(self._launcher),
        )
        self._launches.append(launch)
        torch_agent.attach(
            around_start=launch.starting_workers,
            on_signal=self._end_by_signal,
            redirect=launch.redirect_output,
            on_success=self._wait_for_the_others,
        )
        return launch

    def _limits(self, agent: torch_agent.CallingAgent) -> tuple[int, int]:
        """The limits of the number of nodes, in whole replicas. Raises ConfigError."""
        given = self._parameters.min_nodes, self._parameters.max_nodes
        size = self._job.options.replica_size
        low, high = require_whole_replicas(size, nproc=agent.nproc, limits=given)
        if (per_replica := nodes_per_replica(size, agent.nproc)) > 1:
            get_logger().info(
                "replica_size=%d with %d workers per node: a replica takes %d nodes, and the job "
                "%d to %d (%d to %d replicas)",
                *(size, agent.nproc, per_replica, low, high),
                *(low // per_replica, high // per_replica),
            )
        return low, high

    def _warm_up(self, launch: Launch) -> RendezvousInfo:
        """A world of only this node, in which workers prepare to join the running one.

        They receive their real ranks over the link. A script that builds a group from the
        environment anyway fails immediately: ``env://`` cannot parse the port, and shows it.
        """
        launch.set_world(NO_WORLD, launch.service.peer_addresses(None))
        launch.service.warm_up()
        return RendezvousInfo(
            torch_agent.private_store((launch.service.member,)),
            0,
            1,
            RendezvousStoreInfo("localhost", CALL_JOIN),  # type: ignore[arg-type]
        )

    def num_nodes_waiting(self) -> int:
        """1 when the workers run a world that is no longer the newest: torch then restarts
        them through :meth:`next_rendezvous`. (Torch's own backends report joining nodes only:
        survivors of a lost node wait for their collectives to fail, pytorch#111646.)"""
        if not self._launches:
            return 0
        launch = self._launches[0]
        launch.service.status.watchdog.heartbeat()
        launch.leaving.install()
        launch.leaving.phase = LauncherPhase.RUNNING
        launch.look_at_workers(torch_agent.supervision())
        if launch.service.is_stopped:
            launch.leaving.request()
        if launch.leaving.is_requested:
            launch.leaving.end_if_left()
            return 0
        try:
            if launch.service.job_is_done and launch.service.status.running is None:
                raise JobSucceeded("the job was done before this node's workers had joined it")
            return 1 if launch.service.newer_world() else 0
        except (ElasticError, JobSucceeded) as error:
            self._end(error)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        """Do nothing: a node that fails leaves, and does not close the job for the others."""

    def get_run_id(self) -> str:
        """The given id; a generated one if none was given."""
        return self._run_id

    def shutdown(self) -> bool:
        """Leave gracefully. torch calls this after success and after failure alike, inside a
        ``finally``: the exception in flight distinguishes them (torch 2.13, launcher/api.py)."""
        if self._closed:
            return True
        self._closed = True
        in_flight = sys.exc_info()[1]
        if in_flight is self._handled_outside:
            in_flight = None
        if self._launches:
            self._launches[0].end(in_flight)
        else:
            self._job.store.close()
            if self._launcher is not Launcher.TORCHRUN:
                self._signals.restore()
        return True

    # ── ends ─────────────────────────────────────────────────────────────────────────────

    def _wait_for_the_others(self) -> bool:
        """The workers of this node have succeeded. Returns whether they are to be started again."""
        try:
            return self._launches[0].finish()
        except ElasticError as error:
            self._end(error)

    def _end_by_signal(self, error: SignalException) -> None:
        """torch's agent has ended its workers; ``shutdown`` is not called after a signal."""
        if not self._closed:
            self._closed = True
            self._launches[0].end_by_signal(error.sigval)

    def _end(self, error: ElasticError | JobSucceeded) -> NoReturn:
        """End this agent with an exception that its launcher handles, not with a traceback."""
        for launch in self._launches:
            # torch ends the workers next, and must not be interrupted.
            launch.leaving.phase = LauncherPhase.CLOSING
            launch.service.expect_end_of_workers()
            launch.mark_final_shutdown()
        raise ending(error, self._launcher) from error
