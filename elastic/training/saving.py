"""When a worker saves, and what happens when it cannot: training goes on with older checkpoints."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import checkpoints
from checkpoints import SaveError
from checkpoints.naming import parse_committed
from elastic.clock import SYSTEM_CLOCK
from elastic.errors import CheckpointRequired, ConfigError
from elastic.events import CheckpointSaved, CheckpointSkipped
from elastic.telemetry.journal import EventSink
from elastic.training.state import JobState
from elastic.worker.world import World

GENERATION_FILE = ".generation"


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often to save. ``join(checkpoints="folder")`` takes the defaults."""

    folder: str | os.PathLike[str]
    _: KW_ONLY
    every_steps: int = 50  # steps between two saves; the end of training is always saved
    keep: int = 3  # the newest ones that stay
    required: bool = False  # refuse to start from step 0 (exit code 65)

    def __post_init__(self) -> None:
        if self.every_steps < 1:
            raise ConfigError(f"every_steps={self.every_steps} must be at least 1")
        if self.keep < 1:
            raise ConfigError(f"keep={self.keep} must be at least 1")


def checkpoints_from(
    given: Checkpoints | str | os.PathLike[str] | None, env: Mapping[str, str] = os.environ
) -> Checkpoints | None:
    """What ``join`` was given, else ``ELASTIC_CHECKPOINTS``, else None: nothing is saved."""
    if isinstance(given, Checkpoints):
        return given
    folder = given if given is not None else env.get("ELASTIC_CHECKPOINTS") or None
    return Checkpoints(folder=folder) if folder is not None else None


@dataclass(frozen=True)
class Source:
    """Where a world's state comes from, as rank 0 found it. JSON, for the other ranks."""

    name: str | None = None  # None: no checkpoint, start with rank 0's initial state
    generation: int = 0  # that checkpoints go on with


class Saver:
    """Finds, loads and saves this job's checkpoints. Does nothing without a policy."""

    def __init__(self, policy: Checkpoints | None, journal: EventSink) -> None:
        self._policy = policy
        self._journal = journal
        self._lineage: checkpoints.Lineage = ()
        self._generation = 0
        self._saved_step = 0  # the last step that is on disk, or was tried to be

    def check_writable(self) -> None:
        """Raise ConfigError if this worker cannot write into the folder."""
        if self._policy is None:
            return
        try:
            os.makedirs(self._policy.folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._policy.folder):
                pass
        except OSError as error:
            raise ConfigError(
                f"checkpoints cannot be written into {self._policy.folder}: {error.strerror}",
                hint="give a folder that every worker may write, on storage that all nodes share",
            ) from error

    def resolve(self, world: World) -> Source:
        """Complete what a dead world left, and choose the checkpoint to go on from: rank 0's task.

        Raises CheckpointRequired if there is none and one was required, or there are some and
        none is whole: a silent start from zero would throw the work away.
        """
        if self._policy is None:
            return Source(None, world.generation)
        folder = self._policy.folder
        checkpoints.sweep(folder, generation=world.generation, nonce=world.nonce)
        found = checkpoints.latest(folder)
        for passed in found.passed_over:
            self._skipped(passed.name, passed.reason)
        if found.checkpoint is None and found.passed_over:
            raise CheckpointRequired(
                f"none of the {len(found.passed_over)} checkpoints in {folder} can be loaded; "
                f"the newest: {found.passed_over[0].name}: {found.passed_over[0].reason}",
                hint="repair the folder, or give another one to start from step 0",
            )
        if found.checkpoint is None and self._policy.required:
            raise CheckpointRequired(
                f"there is no checkpoint in {folder}, and one is required",
                hint="give the folder of the job to go on with, or required=False",
            )
        name = found.checkpoint.name if found.checkpoint else None
        return Source(name, self._next_generation(world, found))

    def _next_generation(self, world: World, found: checkpoints.Resolution) -> int:
        """The world's generation, unless the folder has seen that one: then the next unseen.

        Launchers that count from one again (plain python, stock backends, an emptied etcd) must
        not save below what is there, nor under the number of a world that died before it saved.
        """
        assert self._policy is not None
        seen = [info.generation for info in checkpoints.list_checkpoints(self._policy.folder)]
        passed = [parse_committed(p.name) for p in found.passed_over]
        seen += [name.generation for name in passed if name]
        file = Path(self._policy.folder) / GENERATION_FILE
        with contextlib.suppress(OSError, ValueError):  # none yet, or not ours
            seen.append(int(file.read_text()))
        generation = max([world.generation, *(g + 1 for g in seen)])
        written = file.with_name(f"{GENERATION_FILE}.{world.nonce}")
        written.write_text(f"{generation}\n")
        written.replace(file)
        return generation

    def load(self, name: str) -> checkpoints.Loaded:
        """Read and verify a checkpoint into fresh memory."""
        assert self._policy is not None
        return checkpoints.load(self._policy.folder, name)

    def resume(self, origin: checkpoints.CheckpointInfo | None, generation: int, step: int) -> None:
        """From now on save as ``generation``, which began at ``step`` with ``origin``'s state."""
        self._lineage = checkpoints.descend(origin, generation)
        self._generation = generation
        self._saved_step = step

    @property
    def origin(self) -> tuple[checkpoints.Lineage, int, int]:
        """Lineage, generation and last saved step: what the next world's saves go on from."""
        return self._lineage, self._generation, self._saved_step

    def inherit(self, lineage: checkpoints.Lineage, generation: int, saved_step: int) -> None:
        """From now on save as ``generation``, which began with a live peer's state."""
        self._lineage, self._generation, self._saved_step = lineage, generation, saved_step

    def save_if_due(self, world: World, job: JobState) -> None:
        """Save at the boundaries that the policy names: the same ones on every rank."""
        if self._policy is not None and job.progress.step % self._policy.every_steps == 0:
            self.save(world, job)

    def save(self, world: World, job: JobState) -> None:
        """Write this rank's part, unless this step is saved. Never stops training."""
        step = job.progress.step
        if self._policy is None or step <= self._saved_step:
            return
        self._saved_step = step
        began_s = SYSTEM_CLOCK.monotonic()
        try:
            saved = checkpoints.save(
                self._policy.folder,
                job.tree(),
                step=step,
                nonce=world.nonce,
                generation=self._generation,
                rank=world.rank,
                world_size=world.size,
                lineage=self._lineage,
                data_position=job.data_position(),
                keep=checkpoints.LatestN(self._policy.keep),
            )
        except SaveError as error:
            self._skipped(f"step {step}", str(error))
            return
        for note in saved.notes if saved.committed else ():
            self._skipped(saved.name, note)
        if saved.committed:
            took_s = round(SYSTEM_CLOCK.monotonic() - began_s, 4)
            self._journal.emit(CheckpointSaved(name=saved.name, step=step, duration_s=took_s))

    def _skipped(self, name: str, reason: str) -> None:
        self._journal.emit(CheckpointSkipped(name=name, reason=reason), level=logging.WARNING)
