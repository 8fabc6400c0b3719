"""The checkpoint folder, as managed by rank 0 of a new world.

Rank 0 commits or removes the leftovers of a dead world, and chooses the checkpoint to resume from
and the generation of the next saves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import checkpoints
from checkpoints import CheckpointError, SaveError
from checkpoints.catalog.manifests import read_manifest
from checkpoints.format.names import LATEST, REMOVED_PREFIX, parse_attempt, parse_committed
from checkpoints.storage.failures import is_full, is_unsupported, reading, reason_of
from checkpoints.storage.local import LocalStorage
from checkpoints.storage.patient import PatientStorage, patient
from checkpoints.storage.roots import storage_for
from checkpoints.storage.small_files import read_record, write_record
from elastic.errors import CheckpointRequired, ConfigError
from elastic.telemetry.log import get_logger
from elastic.training.checkpointing.memory_tier import everywhere
from elastic.training.checkpointing.ownership import Ownership
from elastic.training.rebuilding.loading import load_shards
from elastic.training.state.job_state import JobState
from elastic.training.state.shards import room_for
from elastic.world.mesh import check_saved_stages
from elastic.world.world import World, node_name

GENERATION_FILE = ".generation"


@dataclass(frozen=True)
class RestoreSource:
    """The checkpoint chosen by rank 0 for a world's state. Sent to the other ranks as JSON."""

    name: str | None = None  # None: no checkpoint, start with rank 0's initial state
    generation: int = 0  # of the next checkpoints
    is_recorded: bool = True  # the generation is recorded in the folder


class CheckpointFolder:
    """The folder of one job. ``report`` gets the name and reason of every skipped checkpoint."""

    def __init__(
        self,
        root: checkpoints.Root,
        report: Callable[[str, str], object],
        *,
        memory: bool = False,
    ) -> None:
        self.storage = storage_for(root)
        self._reads = patient(self.storage)
        self.has_memory = memory  # also read the nodes' memory
        self._report = report
        self.ownership = Ownership(self.storage, lambda reason: report("folder", reason))

    def check_writable(self, rank: int) -> None:
        """Raise ConfigError if this worker cannot save to the folder.

        A lack of space is only reported: it may end, and the job can load.
        """
        place = self.storage.place
        try:
            PatientStorage(self.storage).repeated(lambda: self._try_to_write(rank))
        except OSError as error:
            if is_full(error):
                self._report("folder", f"{place} has no space: {reason_of(error)}")
                return
            raise ConfigError(
                f"checkpoints cannot be written to {place}: {reason_of(error)}",
                hint="use a folder that every worker can write to, on storage shared by all nodes",
            ) from error
        if rank == 0 and isinstance(self.storage, LocalStorage):
            self._check_renames()

    def _try_to_write(self, rank: int) -> None:
        name = f".writable-{rank}"
        self.storage.make_folder("")
        self.storage.create(name).close()
        self.storage.remove(name)

    def _check_renames(self) -> None:
        """Raise ConfigError if the file system cannot rename a folder, as a commit does."""
        before, after = f"{REMOVED_PREFIX}probe", f"{REMOVED_PREFIX}probe-renamed"
        try:
            self.storage.remove_folder(after)
            self.storage.make_folder(before)
            self.storage.rename(before, after)
        except OSError as error:
            if is_unsupported(error):
                raise ConfigError(
                    f"checkpoints cannot be written to {self.storage.place}: its file system "
                    f"cannot rename folders ({reason_of(error)})",
                    hint="use another file system; for a bucket, its URL, such as s3://bucket/job",
                ) from error
        for folder in (before, after):
            with contextlib.suppress(OSError):  # the next garbage collection removes it
                self.storage.remove_folder(folder)

    def resolve(self, world: World, *, required: bool) -> RestoreSource:
        """Commit or remove the leftovers of a dead world, and choose the checkpoint to resume from.

        Nothing here must be written: a job on a full disk loads and trains. Raises as
        :meth:`choose` does.
        """
        with self._readable() as storage, reading(self.storage.place):
            entries = self._list(self._reads)
            entries += self._list(storage) if self.has_memory else []
        generation = self._next_generation(world, entries)
        collected = checkpoints.collect_garbage(
            self.storage, generation=generation, nonce=world.nonce
        )
        for leftover in collected.failed:
            self._report(leftover.folder, leftover.reason)
        name = self.choose({}, required=required)
        return RestoreSource(name, generation, self._record(generation))

    def choose(self, unusable: Mapping[str, str], *, required: bool) -> str | None:
        """The newest checkpoint whose manifest is valid, other than the ``unusable`` ones, whose
        load has failed; None if there is none. Its content is verified as it is loaded, on all
        ranks at once: one rank alone would take hours for a large one.

        Raises CheckpointRequired if there is none and one is required, or if an earlier world has
        saved and none of its checkpoints can be loaded: a silent start from step 0 would discard
        the work. Raises checkpoints.ReadFailed if the folder or a tier cannot be read.
        """
        with self._readable() as storage:
            found = checkpoints.latest(storage, unusable=unusable)
        for passed in found.skipped:
            if not unusable or passed.name == list(unusable)[-1]:  # others are reported already
                self._report(passed.name, passed.reason)
        if found.checkpoint is None:
            self._check_may_begin(found, required=required)
        return found.checkpoint.name if found.checkpoint else None

    def _list(self, storage: checkpoints.Storage) -> list[str]:
        try:
            return storage.list("")
        except FileNotFoundError:
            return []

    def _check_may_begin(self, found: checkpoints.Resolution, *, required: bool) -> None:
        """Raise CheckpointRequired if a start from step 0 would discard work."""
        place = self.storage.place
        if found.skipped:
            raise CheckpointRequired(
                f"none of the {len(found.skipped)} checkpoints in {place} can be loaded; "
                f"the newest: {found.skipped[0].name}: {found.skipped[0].reason}",
                hint="repair the folder, or use another one to start from step 0",
            )
        if required:
            raise CheckpointRequired(
                f"there is no checkpoint in {place}, but one is required",
                hint="use the folder of the job to resume, or required=False",
            )
        newest = (read_record(self._reads, LATEST) or b"").decode("ascii", "replace").strip()
        if parse_committed(newest) is not None:
            raise CheckpointRequired(
                f"there is no checkpoint in {place}, but its file {LATEST} names {newest}",
                hint=f"restore that checkpoint, or remove {LATEST} to start from step 0",
            )

    def _next_generation(self, world: World, entries: Iterable[str]) -> int:
        """The world's generation, or the next unused one if the folder already contains it.

        Launchers that restart at generation 1 (plain python, stock backends, an emptied etcd) must
        neither save below existing generations, nor reuse that of a world that died before saving.
        """
        names = [parse_committed(entry) or parse_attempt(entry) for entry in entries]
        seen = [name.generation for name in names if name is not None]
        seen += _number(read_record(self._reads, GENERATION_FILE))
        return max([world.generation, *(g + 1 for g in seen)])

    def _record(self, generation: int) -> bool:
        """Record the generation; returns whether that succeeded."""
        try:
            write_record(self.storage, GENERATION_FILE, f"{generation}\n".encode())
        except SaveError as error:
            self._report("folder", f"its generation cannot be recorded: {error.message}")
            return False
        return True

    def check_shared(self, rank: int, generation: int) -> None:
        """Warn if this rank does not see the generation that rank 0 has written: each of them then
        saves its share into a folder of its own, and no checkpoint is ever complete.

        Only a warning: some network file systems show a new file after a delay.
        """
        with contextlib.suppress(CheckpointError):  # reported by the saves
            if _number(read_record(self._reads, GENERATION_FILE)) != [generation]:
                get_logger().warning(
                    "the checkpoint folder %s is not shared by all nodes: rank %d on node %s does "
                    "not see what rank 0 has written there. No checkpoint of several ranks can be "
                    "completed. Pass elastic.join(checkpoints=…) the absolute path of a folder on "
                    "storage that all nodes share, or a URL such as s3://bucket/job",
                    _absolute(self.storage.place),
                    rank,
                    node_name(),
                )

    def load(self, name: str, job: JobState | None = None) -> checkpoints.LoadResult:
        """Read and verify a checkpoint into new memory: for sharded tensors this rank's shards,
        and in place for objects created by run.build."""
        with self._readable() as storage:
            if job is not None and job.built is not None:
                return load_shards(
                    storage,
                    name,
                    modules=job.built.modules,
                    tracked=job.built.tracked,
                    check=lambda tree: job.check(tree, f"checkpoint {name}"),
                )
            if job is None or not job.is_sharded:
                return checkpoints.load(storage, name)
            manifest, stage = read_manifest(storage, name), job.stage
            check_saved_stages(manifest.tree.get("dict", {}), stage, f"checkpoint {name}")
            if stage is None:
                room = room_for(manifest, job)
                return checkpoints.load(storage, name, into=room, strict=False)
            room = {stage.key: room_for(manifest, job, below=stage.key)}
            loaded = checkpoints.load(storage, name, into=room, strict=False, only=stage.key)
            return dataclasses.replace(loaded, state=loaded.state[stage.key])

    @contextlib.contextmanager
    def _readable(self) -> Iterator[checkpoints.Storage]:
        """The folder, combined with all nodes' memory if that is enabled."""
        if not self.has_memory:
            yield self._reads
            return
        with everywhere(self.storage, self._report) as storage:
            yield storage


def _absolute(place: str) -> str:
    return place if "://" in place else os.path.abspath(place)


def _number(record: bytes | None) -> list[int]:
    try:
        value = json.loads(record or b"")
    except ValueError:  # no record yet, or unreadable
        return []
    return [value] if type(value) is int and value >= 0 else []
