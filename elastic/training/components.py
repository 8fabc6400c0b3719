"""The parts of training, and how they are put together: the only place that knows all of them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from elastic.process_group import ProcessGroup
from elastic.telemetry.journal import EventSink
from elastic.telemetry.ledger import Ledger
from elastic.training.attempts import Attempts
from elastic.training.checkpointing.manager import CheckpointManager
from elastic.training.current_step import CurrentStep
from elastic.training.halt import Halt
from elastic.training.lifecycle import Lifecycle
from elastic.training.listeners import Listeners
from elastic.training.loop.callbacks import StepCallbacks
from elastic.training.loop.commits import Commits
from elastic.training.loop.scope import Scope
from elastic.training.loop.step_loop import StepLoop
from elastic.training.preemption import Preemption
from elastic.training.recovery.bootstrap import Bootstrap
from elastic.training.recovery.in_process import InProcess
from elastic.training.recovery.progress import RankProgress
from elastic.training.recovery.restart import Restart
from elastic.training.recovery.selection import Strategies
from elastic.training.recovery.step_timer import StepTimer
from elastic.training.shutdown import Shutdown
from elastic.training.state.job_state import JobState
from elastic.training.state.registry import Registry
from elastic.training.step_account import StepAccount
from elastic.worker.worlds import Worlds


@dataclass(frozen=True, kw_only=True)
class Components:
    """What a :class:`~elastic.training.run.Run` delegates to. One per process."""

    device: torch.device
    registry: Registry
    current: CurrentStep
    scope: Scope
    lifecycle: Lifecycle
    checkpoints: CheckpointManager
    progress: RankProgress
    strategies: Strategies
    bootstrap: Bootstrap
    loop: StepLoop
    attempts: Attempts
    callbacks: StepCallbacks
    listeners: Listeners
    shutdown: Shutdown
    preemption: Preemption

    @property
    def job(self) -> JobState:
        """The state of the job."""
        return self.registry.job


def assemble(
    *,
    seed: int,
    group: ProcessGroup,
    checkpoints: CheckpointManager,
    ledger: Ledger,
    journal: EventSink,
    worlds: Worlds | None = None,
) -> Components:
    """The parts of one process. ``worlds`` is the link to its agent: by default that of
    ``ELASTIC_LINK``, or none.

    Raises LinkError if the agent does not answer.
    """
    current, scope, halt, timer = CurrentStep(), Scope(), Halt(), StepTimer()
    callbacks, listeners = StepCallbacks(), Listeners()
    registry = Registry(seed=seed, inside=lambda: current.inside)
    job = registry.job
    if worlds is None and (link := os.environ.get("ELASTIC_LINK")):
        worlds = _connect(link, group, job, current, timer)
    if worlds is not None:
        checkpoints.fence(is_superseded=worlds.is_superseded, is_permitted=worlds.is_permitted)
    registry.piggyback(checkpoints.flags)
    account = StepAccount(journal)
    lifecycle = Lifecycle(job, group, checkpoints, ledger, listeners, account)
    progress = RankProgress(job, registry.guard, current)
    restart = Restart(job, lifecycle, group, checkpoints, progress, halt, worlds)
    in_process = None
    if worlds is not None:
        in_process = InProcess(
            job, current, worlds, group, lifecycle, checkpoints, progress, timer, account, journal
        )
    strategies = Strategies(restart, in_process, group)
    bootstrap = Bootstrap(job, lifecycle, checkpoints, progress, strategies)
    commits = Commits(
        registry, current, lifecycle, strategies, progress, checkpoints, callbacks, ledger, account
    )
    loop = StepLoop(
        registry=registry,
        current=current,
        scope=scope,
        lifecycle=lifecycle,
        strategies=strategies,
        bootstrap=bootstrap,
        progress=progress,
        checkpoints=checkpoints,
        commits=commits,
        halt=halt,
        worlds=worlds,
        ledger=ledger,
    )
    attempts = Attempts(
        registry=registry,
        scope=scope,
        lifecycle=lifecycle,
        strategies=strategies,
        bootstrap=bootstrap,
        progress=progress,
        loop=loop,
        callbacks=callbacks,
        listeners=listeners,
    )
    shutdown = Shutdown(
        registry=registry,
        current=current,
        lifecycle=lifecycle,
        strategies=strategies,
        progress=progress,
        checkpoints=checkpoints,
        loop=loop,
        halt=halt,
        group=group,
        worlds=worlds,
        ledger=ledger,
        account=account,
        journal=journal,
    )
    preemption = Preemption(
        job=job,
        current=current,
        lifecycle=lifecycle,
        strategies=strategies,
        progress=progress,
        checkpoints=checkpoints,
        halt=halt,
        group=group,
        worlds=worlds,
        journal=journal,
    )
    return Components(
        device=group.device,
        registry=registry,
        current=current,
        scope=scope,
        lifecycle=lifecycle,
        checkpoints=checkpoints,
        progress=progress,
        strategies=strategies,
        bootstrap=bootstrap,
        loop=loop,
        attempts=attempts,
        callbacks=callbacks,
        listeners=listeners,
        shutdown=shutdown,
        preemption=preemption,
    )


def _connect(
    link: str, group: ProcessGroup, job: JobState, current: CurrentStep, timer: StepTimer
) -> Worlds:
    worlds = Worlds(
        abort=group.abort,
        position=lambda: timer.heartbeat(worlds.entering, job, current),
        current_step=lambda: current.first_number,
    )
    worlds.connect(link, local_rank=int(os.environ.get("LOCAL_RANK", "0")))
    return worlds
