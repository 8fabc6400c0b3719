"""Assembles the components of training. The only module that imports all of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from elastic import torch_private
from elastic.errors import ConfigError
from elastic.link.protocol import Heartbeat, ReplicaMet
from elastic.mesh import ModelReplica, ReplicaMeeting, mesh_of, process_group
from elastic.messages.environment import number_on_node
from elastic.process_group import ProcessGroup, choose_device
from elastic.telemetry.journal import EventSink, Journal
from elastic.telemetry.ledger import Ledger
from elastic.training.attempts import Attempts
from elastic.training.checkpointing.manager import CheckpointManager
from elastic.training.checkpointing.options import Checkpoints
from elastic.training.current_step import CurrentStep, logged_at
from elastic.training.halt import Halt
from elastic.training.lifecycle import Lifecycle
from elastic.training.listeners import Listeners
from elastic.training.loop.boundary import StepBoundary
from elastic.training.loop.callbacks import StepCallbacks
from elastic.training.loop.commits import Commits
from elastic.training.loop.loops import steps_left
from elastic.training.loop.scope import Scope
from elastic.training.loop.step_loop import StepLoop
from elastic.training.misuse.early_leave import EarlyLeave
from elastic.training.observers.defaults import default_writers
from elastic.training.observers.metrics_log import MetricsLog
from elastic.training.observers.profiling import ProfileRequest, StepProfiler
from elastic.training.observers.progress_line import ProgressLine
from elastic.training.observers.progress_line import is_wanted as progress_is_wanted
from elastic.training.observers.step_observers import Recorders, StepObservers
from elastic.training.preemption import Preemption
from elastic.training.recovery.bootstrap import Bootstrap
from elastic.training.recovery.in_process import InProcess
from elastic.training.recovery.progress import RankProgress
from elastic.training.recovery.restart import Restart
from elastic.training.recovery.selection import Strategies
from elastic.training.recovery.step_timer import StepTimer
from elastic.training.recovery.training_state import TrainingState
from elastic.training.shutdown import Shutdown
from elastic.training.state.job_state import JobState
from elastic.training.state.registry import Registry
from elastic.training.step_account import StepAccount
from elastic.tuning.worker_intervals import REPLICA_MEETS_S
from elastic.worker.received_world import replica_spec
from elastic.worker.worlds import Worlds
from elastic.world.failure import FailureHook
from elastic.world.world import node_name, world_from_environment


@dataclass(frozen=True, kw_only=True)
class Connectivity:
    """The connections of this process to others."""

    group: ProcessGroup
    worlds: Worlds | None  # the link to the agent


@dataclass(frozen=True, kw_only=True)
class ScriptCalls:
    """The script's scope in the API, and its callbacks."""

    scope: Scope
    callbacks: StepCallbacks
    listeners: Listeners


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """The components that report on this process."""

    recorders: Recorders
    metrics: MetricsLog
    profiler: StepProfiler


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The components that take this process from one world to the next."""

    strategies: Strategies
    bootstrap: Bootstrap


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The components that end the process: after the script, or at SIGTERM."""

    failure: FailureHook
    shutdown: Shutdown
    preemption: Preemption


@dataclass(frozen=True, kw_only=True)
class Components:
    """The components that :class:`~elastic.training.run.Run` delegates to. One per process."""

    connectivity: Connectivity
    state: TrainingState
    lifecycle: Lifecycle
    checkpoints: CheckpointManager
    recovery: Recovery
    script: ScriptCalls
    loop: StepLoop
    attempts: Attempts
    reporting: Reporting
    ending: Ending

    @property
    def job(self) -> JobState:
        """The state of the job."""
        return self.state.job

    @property
    def worlds(self) -> Worlds | None:
        """The link to the agent; None without one."""
        return self.connectivity.worlds

    def position(self) -> dict[str, int | None]:
        """This rank's position, for the lines of its journal."""
        return _position(self.job, self.lifecycle)


def _position(job: JobState, lifecycle: Lifecycle) -> dict[str, int | None]:
    step = job.progress.step
    if not lifecycle.has_world:
        return {"step": step}
    world = lifecycle.world
    return {"rank": world.rank, "generation": world.generation, "step": step}


def assemble(
    *,
    seed: int,
    group: ProcessGroup,
    replica: ModelReplica | None = None,
    checkpoints: CheckpointManager,
    ledger: Ledger,
    journal: EventSink,
    worlds: Worlds | None = None,
) -> Components:
    """Assemble the components of one process. ``worlds``: the link to its agent; by default the one
    in ``ELASTIC_LINK``, or none.

    Raises LinkError if the agent does not answer.
    """
    halt, timer = Halt(), StepTimer()
    state = _training_state(seed, group)
    if worlds is None and (link := os.environ.get("ELASTIC_LINK")):
        worlds = _connect(link, group, state.job, state.current, timer)
    if replica is not None and replica.mesh:
        _form(replica, worlds)
        state.job.stage = replica.mesh.stage_of(replica.position)
    if worlds is not None:
        checkpoints.fence(is_superseded=worlds.is_superseded, is_permitted=worlds.is_permitted)
        worlds.max_ranks = state.registry.max_ranks
    state.registry.piggyback(checkpoints.flags)
    script = ScriptCalls(scope=Scope(), callbacks=StepCallbacks(), listeners=Listeners())
    reporting = _reporting(state, script.scope, ledger, journal)
    if worlds is not None:
        worlds.on_profile = lambda request: reporting.profiler.request(
            ProfileRequest(request.steps, ranks=request.ranks)
        )
    recorders = reporting.recorders
    lifecycle = Lifecycle(
        state.job, group, checkpoints, ledger, script.listeners, recorders.observers, replica
    )
    early_leave = EarlyLeave(
        state.job,
        state.current,
        lifecycle,
        group,
        worlds,
        is_catching_up=lambda: state.progress.is_catching_up,
    )
    if worlds is not None:
        worlds.on_heartbeat = early_leave.on_heartbeat
    restart = Restart(state, lifecycle, group, checkpoints, halt, worlds)
    in_process = None
    if worlds is not None:
        in_process = InProcess(
            state, worlds, group, lifecycle, checkpoints, timer, recorders, early_leave
        )
    strategies = Strategies(restart, in_process, group)
    bootstrap = Bootstrap(state, lifecycle, strategies)
    loop = StepLoop(
        state=state,
        scope=script.scope,
        lifecycle=lifecycle,
        strategies=strategies,
        bootstrap=bootstrap,
        boundary=StepBoundary(
            state=state,
            lifecycle=lifecycle,
            strategies=strategies,
            checkpoints=checkpoints,
            halt=halt,
            worlds=worlds,
        ),
        commits=Commits(state, lifecycle, strategies, checkpoints, script.callbacks, recorders),
        early_leave=early_leave,
        ledger=ledger,
    )
    failure = FailureHook(
        journal,
        lambda: _position(state.job, lifecycle),
        **({} if worlds is None else {"notify": worlds.fail}),
    )
    attempts = Attempts(
        state=state,
        scope=script.scope,
        lifecycle=lifecycle,
        strategies=strategies,
        bootstrap=bootstrap,
        loop=loop,
        callbacks=script.callbacks,
        listeners=script.listeners,
        failure=failure,
    )
    shutdown = Shutdown(
        state=state,
        lifecycle=lifecycle,
        strategies=strategies,
        checkpoints=checkpoints,
        loop=loop,
        halt=halt,
        group=group,
        worlds=worlds,
        recorders=recorders,
        failure=failure,
    )
    preemption = Preemption(
        state=state,
        lifecycle=lifecycle,
        strategies=strategies,
        checkpoints=checkpoints,
        halt=halt,
        group=group,
        worlds=worlds,
        recorders=recorders,
    )
    return Components(
        connectivity=Connectivity(group=group, worlds=worlds),
        state=state,
        lifecycle=lifecycle,
        checkpoints=checkpoints,
        recovery=Recovery(strategies=strategies, bootstrap=bootstrap),
        script=script,
        loop=loop,
        attempts=attempts,
        reporting=reporting,
        ending=Ending(failure=failure, shutdown=shutdown, preemption=preemption),
    )


def _training_state(seed: int, group: ProcessGroup) -> TrainingState:
    current = CurrentStep()
    registry = Registry(seed=seed, inside=lambda: current.inside, group=group)
    return TrainingState(
        registry, current, RankProgress(registry.job, registry.optimizer_watch, current)
    )


def _reporting(state: TrainingState, scope: Scope, ledger: Ledger, journal: EventSink) -> Reporting:
    metrics = MetricsLog(
        journal,
        lambda: logged_at(state.current, state.job.progress),
        default_writers=default_writers,
    )
    progress_line = ProgressLine(
        lambda: metrics.newest,
        lambda: steps_left(scope, state.job),
        is_on=progress_is_wanted(),
    )
    profiler = StepProfiler(journal)
    observers = StepObservers(StepAccount(journal), metrics, progress_line, profiler)
    return Reporting(
        recorders=Recorders(ledger, journal, observers), metrics=metrics, profiler=profiler
    )


def _form(replica: ModelReplica, worlds: Worlds | None) -> None:
    """Form the group of this replica's ranks. Raises ConfigError without an agent to form it."""
    if replica.mesh.size == 1:
        replica.form(None)
        return
    if worlds is None:
        raise ConfigError(
            f"elastic.join(mesh=…) with replicas of {replica.mesh.size} ranks (mesh "
            f"{replica.mesh}) needs an agent in in-process mode",
            hint="torchrun --rdzv-backend=etcd …; with other launchers, sharded models recover by "
            "a restart (docs/how-to/sharded.md)",
        )
    found = worlds.meet_replica(
        replica.mesh.size,
        REPLICA_MEETS_S,
        mesh=str(replica.mesh),
        on_device=replica.device.type != "cpu",
    )
    folder = os.path.dirname(os.environ["ELASTIC_LINK"])
    spec = replica_spec(found, replica.mesh.size)
    replica.form(ReplicaMeeting(folder, found.nonce, spec))
    worlds.send(ReplicaMet())


def _connect(
    link: str, group: ProcessGroup, job: JobState, current: CurrentStep, timer: StepTimer
) -> Worlds:
    def position() -> Heartbeat:
        group.report_collectives()
        return timer.heartbeat(worlds.entering, job, current)

    worlds = Worlds(
        abort=group.abort,
        position=position,
        current_step=lambda: current.first_number,
    )
    worlds.connect(link, local_rank=number_on_node(os.environ))
    return worlds


def journal_of_environment() -> Journal:
    """The journal in the folder ``ELASTIC_JOURNAL``; without the variable it writes no file."""
    return Journal(
        folder=os.environ.get("ELASTIC_JOURNAL"),
        identity={
            "node": node_name(),
            "rank": int(os.environ.get("RANK", "0")),
            "generation": world_from_environment().generation,
        },
        role="worker",
        run_id=os.environ.get("TORCHELASTIC_RUN_ID"),
    )


def start_components(
    policy: Checkpoints | None,
    *,
    seed: int = 0,
    backend: str | None = None,
    journal: EventSink | None = None,
    manager: CheckpointManager | None = None,
    worlds: Worlds | None = None,
    mesh: Mapping[str, int] | None = None,
) -> Components:
    """The components of a run that the caller closes: :func:`join` without the exit hooks.

    By default ``journal`` is the one in ``ELASTIC_JOURNAL``, ``manager`` one for ``policy``, and
    ``worlds`` the link in ``ELASTIC_LINK``.
    """
    torch_private.check()
    device = choose_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    replica = mesh_of(mesh, device, backend)
    own = journal_of_environment() if journal is None else None
    journal = own if own is not None else journal
    assert journal is not None
    components = assemble(
        seed=seed,
        group=process_group(device, backend, replica, journal),
        replica=replica,
        checkpoints=CheckpointManager(policy, journal) if manager is None else manager,
        ledger=Ledger.from_environment(),
        journal=journal,
        worlds=worlds,
    )
    if own is not None:
        own.locate(components.position)
        if components.worlds is not None:
            own.listen(components.worlds.count)
    components.ending.preemption.install()
    return components
