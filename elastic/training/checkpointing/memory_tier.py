"""Frequent, asynchronous saves to the nodes' memory, between two saves to disk.

The agents host that memory (:mod:`checkpoints.memory.host`), so it survives the workers. Each
agent also has a copy of another agent's parts, which survives the loss of a node. If no rank with
the state survives, a new world resumes from the newest checkpoint in memory or on disk.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import checkpoints
from checkpoints import LatestN, SaveHandle, SaveOutcome, SaveStatus, Storage, TieredStorage
from checkpoints.memory.host import memory_roots, own_memory
from checkpoints.saving.supervised import SupervisedEngine
from elastic.clock import Clock
from elastic.training.checkpointing.memory_interval.agreed import MemoryInterval
from elastic.training.state.job_state import JobState
from elastic.tuning.worker_intervals import MEMORY_WAIT_S

VARIABLE = "ELASTIC_NODE_MEMORY"
KEEP = LatestN(3)  # ranks write at different speeds, and a checkpoint needs all parts

Report = Callable[[str, str], object]


class MemoryTier:
    """This rank's saves to its node's memory. ``report`` gets each skipped save and its reason."""

    def __init__(
        self,
        interval: MemoryInterval,
        *,
        report: Report,
        on_death: Callable[[str], object],
        clock: Clock,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        self.interval = interval
        self._report = report
        self._failure = ""  # the last reported one
        self._saved_step = -1  # in this world
        self._is_owed = False  # the next boundary at which that is possible saves
        self._engine: SupervisedEngine | None = None
        self.waits = False  # training waits if this rank's writes fall behind
        folder = node_memory(env)
        if folder is None:
            self._report_once(
                "memory", "no agent hosts memory here: checkpoints are saved to disk only"
            )
            return
        try:
            storage = own_memory(folder)
        except OSError as error:
            self._report_once("memory", f"the agent's memory cannot be used: {error}")
            return
        self._engine = SupervisedEngine(
            storage,
            KEEP,
            report=self._ended,
            on_death=on_death,
            clock=clock.wall,
            monotonic=clock.monotonic,
            sleep=clock.sleep,
        )

    @property
    def is_hosted(self) -> bool:
        """Whether this node's agent hosts memory that can be used."""
        return self._engine is not None

    def enter_world(self, size: int, *, saves_first: bool) -> None:
        """Begin a world. ``saves_first``: all its writers save at its first boundary, too."""
        self.interval.enter_world(size)
        self._saved_step = -1
        self._is_owed = saves_first

    def at_boundary(
        self,
        job: JobState,
        world: checkpoints.WriterGroup,
        *,
        is_writer: bool = True,
    ) -> None:
        """Save between two steps if a save is due and a buffer is free. Waits only if
        :attr:`waits` is set, until the share of an earlier boundary is written.

        ``is_writer``: whether this rank writes a share; the others only follow the interval.
        """
        step = job.progress.step
        self.interval.meter.reached(step)
        if self._engine is not None:
            self._engine.poll()
            if self.waits:
                self._engine.finish_writing(MEMORY_WAIT_S)
        saves = self.interval.is_due(step) or self._is_owed
        self._is_owed = False
        if saves and step != self._saved_step:
            self._saved_step = step
            if is_writer:
                self.begin(job, world, wait_s=0.0)
        self.interval.meter.left(has_saved=saves, is_writer=is_writer)

    def save_now(self, job: JobState, world: checkpoints.WriterGroup, budget_s: float) -> None:
        """Write this rank's share of the current step unless its write has begun, and wait."""
        if self._engine is None:
            return
        if job.progress.step != self._saved_step:
            self._saved_step = job.progress.step
            self.begin(job, world, wait_s=budget_s)
        self._engine.finish_writing(budget_s)

    def begin(
        self, job: JobState, world: checkpoints.WriterGroup, *, wait_s: float
    ) -> SaveHandle | None:
        """Pass this rank's share of a checkpoint of ``world`` to the engine, if there is one."""
        if self._engine is None:
            return None
        return self._engine.save(
            job.saved_tree(),
            step=job.progress.step,
            world=world,
            data_position=job.data_position(),
            wait_s=wait_s,
        )

    def poll(self) -> None:
        """Report finished saves."""
        if self._engine is not None:
            self._engine.poll()

    def close(self) -> None:
        """Drop incomplete writes; other tiers and older checkpoints have the state."""
        if self._engine is not None:
            self._engine.close(0.0)

    def _ended(self, outcome: SaveOutcome) -> None:
        if outcome.status is SaveStatus.COMMITTED:
            self._failure = ""
            if not self.waits:
                self.interval.meter.wrote(outcome.write_s)
        else:
            self._report_once(outcome.name, f"memory: {outcome.status.value}: {outcome.reason}")

    def _report_once(self, name: str, reason: str) -> None:
        """Report a failure once while it lasts: it may occur every few steps."""
        if not self._failure:
            self._failure = reason
            self._report(name, reason)


def node_memory(env: Mapping[str, str] = os.environ) -> Path | None:
    """The folder that this node's agent hosts, if there is one."""
    folder = env.get(VARIABLE)
    return Path(folder) if folder else None


@contextlib.contextmanager
def everywhere(disk: Storage, report: Report) -> Iterator[Storage]:
    """The disk and all nodes' memory combined, for reading; failures are reported."""
    folder = node_memory()
    try:
        memory = memory_roots(folder) if folder is not None else []
    except OSError as error:
        report("memory", f"the agent's memory cannot be used: {error}")
        memory = []
    tiers = TieredStorage([*memory, disk])
    try:
        yield tiers
    finally:
        for failure in tiers.failures:
            report("memory", f"{failure.place}: {failure.reason}")
        tiers.close()
