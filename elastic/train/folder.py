"""The folder of a job's checkpoints: its options, and its owner."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace

import checkpoints
from checkpoints import (
    CheckpointError,
    EverySteps,
    LatestN,
    ReadFailed,
    RetentionPolicy,
    SaveError,
    SavePolicy,
    SkippedCheckpoint,
    Storage,
)
from checkpoints.commit import read_manifest
from checkpoints.loading import LoadGroup, Progress
from checkpoints.names import LATEST, MAX_GENERATION, parse_attempt, parse_committed
from checkpoints.objects import FolderStorage, storage_for
from checkpoints.storage import (
    LocalStorage,
    PatientStorage,
    is_full,
    patient,
    read_record,
    reading,
    reason_of,
    removed_on_failure,
    write_record,
)
from elastic.errors import (
    SYSTEM_CLOCK,
    CheckpointRequired,
    Clock,
    ConfigError,
    TrainingError,
    described,
)
from elastic.groups.world import World, check_saved_stages, is_launched, node_name
from elastic.telemetry.log import get_logger
from elastic.train.memory import everywhere
from elastic.train.rebuilding import load_shards
from elastic.train.shards import room_for
from elastic.train.state import JobState
from elastic.tuning.intervals import (
    OWNER_HEARTBEAT_S,
)

# A read that fails transiently while a job restores its state is repeated for this long: a network
# file system that fails over is back within a minute, and an older checkpoint costs more.
RESTORE_PATIENCE_S = 60.0
# Six renewals: restarted workers are back within seconds, and their job must not lose its folder in
# the meantime.
OWNER_WATCH_S = 6 * OWNER_HEARTBEAT_S
# A job with the same run id waits less: without agents that share an etcd it is usually the same
# job, whose rank 0 has ended. Three renewals, of which one may be late.
OWNER_SILENCE_S = 3 * OWNER_HEARTBEAT_S
# How often renewals by another owner are checked.
OWNER_LOOK_S = 0.25
# For the renewing thread to end: a disk may hang.
OWNER_JOIN_S = 1.0

# ----------------------------------------------------------------------------
# The owner of a checkpoint folder: one job at a time; a second one is refused.
#
# Rank 0 keeps a record in the folder and increments its counter every few seconds. Another job
# that finds a record watches the counter: if it changes, its owner is alive, and the job is
# refused. A run id alone proves nothing, since two jobs may be started with one by mistake.
#
# There is no wait where the owner is known to have ended, or to be this job:
#
# - it has released the folder;
# - it is a job of the same run id in the same etcd (:data:`INSTANCE`), where agents see to it that
#   there is one rank 0;
# - a process whose end ends its heartbeat has ended on this machine: that of rank 0, or the one
#   that a job on one node cannot outlive (the launcher, or a plain ``python train.py``);
# - it has the same run id, and its record has not changed for :data:`OWNER_SILENCE_S`, by the
#   clock of the storage.
#
# Before it commits, rank 0 reads the record again: a job that was stopped, and replaced in the
# meantime, saves nothing more.

OWNER_FILE = ".owner.json"
INSTANCE = "ELASTIC_RUN_INSTANCE"  # set by agents: the same for all that share a run and an etcd
_PROBE_FILE = ".owner-clock"


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The contents of the record."""

    run_id: str
    node: str  # the node of rank 0
    # The process that the job cannot outlive: boot id, pid namespace, pid, start time; "" if none.
    process: str
    writer: str = ""  # the process of rank 0, in the same form
    instance: str = ""  # of the run, among those with the same run id; "" if unknown
    counter: int = 0
    is_released: bool = False
    running_s: float = 0.0  # how long the job has run, over all its processes
    failures: int = 0  # broken worlds of the job


class Ownership:
    """One process's claim to a folder. ``report`` is called once if another job has taken it."""

    def __init__(
        self,
        storage: Storage,
        report: Callable[[str], object],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._storage = patient(storage)
        self._report = report
        self._clock = clock
        self._process = _job_process()
        self._run_id = os.environ.get("TORCHELASTIC_RUN_ID") or f"local {self._process}"
        self._before = Owner(
            run_id=self._run_id,
            node=node_name(),
            process=self._process,
            writer=_process(os.getpid()),
            instance=os.environ.get(INSTANCE, ""),
        )
        self._checked_s = -math.inf
        self._began_s = clock.monotonic()
        self._has_claimed = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.failures: Callable[[], int] = lambda: 0  # broken worlds of this process
        self.is_lost = False

    def claim(self) -> Owner | None:
        """Claim the folder for this job; returns the job's earlier record, if any.

        Raises ConfigError if another job saves to it, after at most OWNER_WATCH_S.
        """
        record = self._read()
        if record is not None and (watch_s := self._watch_s(record)) > 0:
            if watch_s == OWNER_SILENCE_S:
                watch_s -= self._unchanged_s()
            self._watch(record, watch_s)
        self._adopt(record)
        self._has_claimed = True
        self.heartbeat()
        return self._before if record is not None else None

    def _adopt(self, record: Owner | None) -> None:
        if record is not None:
            self._before = replace(
                self._before,
                running_s=record.running_s,
                failures=record.failures + (not record.is_released),
            )

    def hold(self) -> None:
        """Keep updating the record, on a separate thread, until :meth:`close`."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, name="checkpoint-owner", daemon=True)
        self._thread.start()

    def heartbeat(self, *, release: bool = False) -> None:
        """Increment the record's counter. The saves report a folder that is not writable."""
        try:
            record = self._read()
            if self._still_owns(record):
                self._write(record, release=release)
        except (CheckpointError, OSError):
            return

    def _write(self, record: Owner | None, *, release: bool) -> None:
        owner = replace(
            self._before,
            counter=(record.counter if record is not None else 0) + 1,
            is_released=release,
            running_s=self._before.running_s + self._clock.monotonic() - self._began_s,
            failures=self._before.failures + self.failures(),
        )
        write_record(self._storage, OWNER_FILE, json.dumps(asdict(owner)).encode())

    def may_commit(self) -> bool:
        """Whether the folder is still this job's. Called before each commit, on rank 0: without its
        share, the other ranks commit nothing."""
        now_s = self._clock.monotonic()
        is_due = self._has_claimed and now_s - self._checked_s > OWNER_LOOK_S
        if self._thread is not None and not self.is_lost and is_due:
            with contextlib.suppress(CheckpointError):  # unknown: the heartbeats check it, too
                self._still_owns(self._read())
            self._checked_s = now_s
        return not self.is_lost

    def _still_owns(self, record: Owner | None) -> bool:
        """Whether the record is this job's. Reports once if it is not."""
        if record is None or self._thread is None or not self._is_of_another_job(record):
            return not self.is_lost
        if not self.is_lost:
            self.is_lost = True
            self._report(
                f"{self._storage.place} was taken over by {_describe(record)}: this job no "
                "longer saves to it"
            )
        return False

    def close(self, *, release: bool) -> None:
        """Stop updating. ``release``: the job has ended, and the folder is free."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(timeout=OWNER_JOIN_S)  # a disk may hang; the thread is a daemon
        if release and not self._thread.is_alive() and not self.is_lost:
            self.heartbeat(release=True)

    def _run(self) -> None:
        if not self._has_claimed:  # an earlier rank 0 of this job has
            with contextlib.suppress(CheckpointError):  # reported by the saves
                self._succeed(self._read())
        while not self.is_lost and not self._stop.wait(OWNER_HEARTBEAT_S):
            self.heartbeat()

    def _succeed(self, record: Owner | None) -> None:
        """Take the record over from the rank 0 of an earlier world, in which this process was."""
        own = self._before
        if record is not None and (record.run_id, record.instance) != (own.run_id, own.instance):
            self._still_owns(record)
        else:
            self._adopt(record)
            self._write(record, release=False)
            self._has_claimed = True

    def _is_of_another_job(self, record: Owner) -> bool:
        """Whether another job has written the record, which may have ended."""
        own = self._before
        if record.is_released:
            return False
        if record.run_id != own.run_id:
            return True
        if record.process != own.process != "" and _is_alive(record.process) is True:
            return True
        is_own = record.writer == own.writer != "" or record.instance == own.instance != ""
        return not is_own

    def _watch_s(self, record: Owner) -> float:
        """How long the record must stay unchanged before this job may claim the folder."""
        if not self._is_of_another_job(record):
            return 0.0
        if record.run_id != self._run_id:
            return 0.0 if _is_alive(record.process) is False else OWNER_WATCH_S
        has_ended = False in (_is_alive(record.process), _is_alive(record.writer))
        is_restart = record.process == self._process != ""  # by the same launcher
        return 0.0 if has_ended or is_restart else OWNER_SILENCE_S

    def _unchanged_s(self) -> float:
        """How long ago the record was written, by the clock of the storage; 0 if unknown."""
        try:
            write_record(self._storage, _PROBE_FILE, b"")
            with removed_on_failure(self._storage, _PROBE_FILE):
                now_s = self._storage.modified_s(_PROBE_FILE)
            self._storage.remove(_PROBE_FILE)
            return max(0.0, now_s - self._storage.modified_s(OWNER_FILE))
        except (CheckpointError, OSError):
            return 0.0

    def _watch(self, record: Owner, watch_s: float) -> None:
        if watch_s <= 0:
            return
        get_logger().warning(
            "%s was last used by %s, which has not reported its end: waiting up to %g s to see "
            "whether it still saves there",
            *(self._storage.place, _describe(record), watch_s),
        )
        until_s = self._clock.monotonic() + watch_s
        while self._clock.monotonic() < until_s:
            self._clock.sleep(OWNER_LOOK_S)
            now = self._read()
            if now is None or self._watch_s(now) <= 0:
                return
            if now.counter != record.counter:
                raise ConfigError(
                    f"another job saves to {self._storage.place}: {_describe(now)}",
                    hint="use a separate folder for each job; to continue that job, end it first",
                )

    def _read(self) -> Owner | None:
        data = read_record(self._storage, OWNER_FILE)
        try:
            values = json.loads(data or b"")
            # Earlier versions wrote no writer and no instance.
            values = {"writer": "", "instance": "", **values}
            known = {field.name: values[field.name] for field in fields(Owner)}
        except (ValueError, KeyError, TypeError):
            return None  # no record yet, or unreadable
        owner = Owner(**known)
        texts = (owner.run_id, owner.node, owner.process, owner.writer, owner.instance)
        counts = (owner.counter, owner.failures)
        is_sane = all(isinstance(text, str) for text in texts)
        is_sane = is_sane and all(type(count) is int and count >= 0 for count in counts)
        return owner if is_sane and isinstance(owner.running_s, (int, float)) else None


def _describe(owner: Owner) -> str:
    return f"job {owner.run_id!r}, rank 0 on node {owner.node}"


def _job_process() -> str:
    """The process that this job cannot outlive; "" if there is none, or it is unknown."""
    if not is_launched():
        return _process(os.getpid())
    nodes = os.environ.get("ELASTIC_MAX_NODES") or os.environ.get("GROUP_WORLD_SIZE")
    return _process(_launcher()) if nodes == "1" else ""


def _launcher() -> int:
    """The pid of the nearest ancestor that was not launched itself; 0 if unknown.

    The parent may be a wrapper that ends with this process.
    """
    pid = os.getppid()
    while pid and b"TORCHELASTIC_RUN_ID=" in _read_bytes(f"/proc/{pid}/environ"):
        pid = _parent_of(pid)
    return pid


def _process(pid: int) -> str:
    """A globally unique identifier of a process; "" if it has ended."""
    state, _, start = _stat(pid)
    boot = _read_bytes("/proc/sys/kernel/random/boot_id").decode().strip()
    if state in "ZX" or not boot:
        return ""
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {pid} {start}"


def _parent_of(pid: int) -> int:
    return int(_stat(pid)[1])


def _stat(pid: int) -> tuple[str, str, str]:
    """State, parent and start time of a process; state X if it has ended."""
    # The command, in parentheses, may contain any character.
    text = _read_bytes(f"/proc/{pid}/stat").decode(errors="replace")
    stat = text.rpartition(")")[2].split()
    return (stat[0], stat[1], stat[19]) if len(stat) > 19 else ("X", "0", "")


def _read_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _is_alive(process: str) -> bool | None:
    """Whether a process of an owner is alive; None if that is unknown on this node."""
    *place, pid, _ = ["", "", *process.split()]
    here = _process(os.getpid()).split()[:2]
    if place[2:] != here or not pid.isdigit():
        return None
    return _process(int(pid)) == process


# ----------------------------------------------------------------------------
# The checkpoint folder, as managed by rank 0 of a new world.
#
# Rank 0 commits or removes the leftovers of a dead world, and chooses the checkpoint to resume
# from and the generation of the next saves.

GENERATION_FILE = ".generation"
_MAX_PATH_BYTES = 2000  # longer texts in messages to an agent lose their middle


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
        self._reads = (
            self.storage
            if isinstance(self.storage, PatientStorage)
            else PatientStorage(self.storage, patience_s=RESTORE_PATIENCE_S)
        )
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

    def _try_to_write(self, rank: int) -> None:
        name = f".writable-{rank}"
        self.storage.make_folder("")
        with removed_on_failure(self.storage, name):
            self.storage.create(name).close()
        self.storage.remove(name)
        if isinstance(self.storage, FolderStorage):
            self.storage.try_a_save()

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
        name = self.choose((), required=required)
        return RestoreSource(name, generation, self._record(generation))

    def choose(self, refused: Sequence[SkippedCheckpoint], *, required: bool) -> str | None:
        """The newest checkpoint whose manifest is valid, other than the ``refused`` ones, whose
        load has failed; None if there is none. Its content is verified as it is loaded, on all
        ranks at once: one rank alone would take hours for a large one.

        A damaged checkpoint is skipped. One that cannot be read may be intact. It is skipped, too,
        if that lasts for RESTORE_PATIENCE_S, while an older one can be read: a file with a bad
        sector must not end a job for good. If several cannot be read, or no older one is left, the
        storage fails and not a file: raises checkpoints.ReadFailed, as for a folder or a tier that
        cannot be read. The next start tries again.

        Raises CheckpointRequired if there is none and one is required, or if an earlier world has
        saved and all its checkpoints are damaged: a silent start from step 0 would discard the
        work.
        """
        unusable = {passed.name: passed.reason for passed in refused}
        with self._readable() as storage:
            newest = checkpoints.latest(storage, unusable=unusable)
        for passed in newest.skipped:
            if not refused or passed.name == refused[-1].name:  # others are reported already
                self._report(passed.name, passed.reason)
        unreadable = {p.name: p.reason for p in (*newest.skipped, *refused) if p.is_unreadable}
        if len(unreadable) > 1 or (unreadable and newest.checkpoint is None):
            names, reason = ", ".join(sorted(unreadable)), next(iter(unreadable.values()))
            raise ReadFailed(
                f"{names} in {self.storage.place} cannot be read: {reason}",
                hint="check the disk or the mount of this node, and start again; to go on from an "
                "older checkpoint, move these folders elsewhere",
            )
        if newest.checkpoint is None:
            self._check_may_begin(newest, required=required)
            return None
        self._warn_of_lost_steps(newest.checkpoint, newest.skipped)
        return newest.checkpoint.name

    def _warn_of_lost_steps(
        self, chosen: checkpoints.CheckpointInfo, skipped: Sequence[SkippedCheckpoint]
    ) -> None:
        names = [(parse_committed(passed.name), passed.reason) for passed in skipped]
        newer = [(n.step, n, why) for n, why in names if n is not None and n.step > chosen.step]
        if not newer:
            return
        step, name, reason = max(newer)
        get_logger().warning(
            "resuming from step %d instead of %d, and repeating the steps between them: %s cannot "
            "be used: %s",
            *(chosen.step, step, name, reason),
        )

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

    def load(
        self,
        name: str,
        job: JobState | None = None,
        group: LoadGroup | None = None,
        progress: Progress | None = None,
    ) -> checkpoints.LoadResult:
        """Read and verify a checkpoint into new memory: for sharded tensors this rank's shards,
        and in place for objects created by run.build.

        ``group``: the ranks that load a state that is not sharded; each reads and verifies a part.
        ``progress``: as in :func:`checkpoints.load`; an exception ends the load.
        """
        with self._readable() as storage:
            if job is not None and job.built is not None:
                return load_shards(
                    storage,
                    name,
                    modules=job.built.modules,
                    tracked=job.built.tracked,
                    check=lambda tree: job.check(tree, f"checkpoint {name}"),
                    progress=progress,
                )
            if job is None or not job.is_sharded:
                return checkpoints.load(storage, name, group=group, progress=progress)
            manifest, stage = read_manifest(storage, name), job.stage
            check_saved_stages(manifest.tree.get("dict", {}), stage, f"checkpoint {name}")
            if stage is None:
                room = room_for(manifest, job)
                return checkpoints.load(storage, name, into=room, strict=False, progress=progress)
            room = {stage.key: room_for(manifest, job, below=stage.key)}
            loaded = checkpoints.load(
                storage, name, into=room, strict=False, only=stage.key, progress=progress
            )
            return dataclasses.replace(loaded, state=loaded.state[stage.key])

    @contextlib.contextmanager
    def _readable(self) -> Iterator[checkpoints.Storage]:
        """The folder, combined with all nodes' memory if that is enabled."""
        if not self.has_memory:
            yield self._reads
            return
        with everywhere(self._reads, self._report) as storage:
            yield storage


def in_job_folder(root: checkpoints.Root, *, job_folder: Callable[[str], str]) -> checkpoints.Root:
    """The same folder for all processes of a job: that of its first one, which ``job_folder``
    returns for that of this process.

    A script may choose another folder at each start or on each node: a relative one under Hydra,
    one named after the time or the host. A process that is started again would find no checkpoint
    there, and begin at step 0. This process's own folder is used if it has checkpoints, or if the
    job's is not on this machine: nodes may mount one folder at different places.
    """
    own = _place(root)
    if not own or not _can_be_sent(own):
        return root
    is_url = "://" in own
    is_new = not is_url and _create(own)  # so that others see whether it is shared
    jobs = job_folder(own)
    if jobs == own or (not is_url and _is_same_folder(jobs, own)):
        return root
    if not is_url and not os.path.isdir(jobs):  # on another machine, or removed
        get_logger().info("the job's checkpoint folder is %s; here it is %s", jobs, own)
        return root
    if _has_checkpoints(own):
        get_logger().warning(
            "the job began with the checkpoint folder %s; using %s, which has checkpoints, too",
            *(jobs, own),
        )
        return root
    if is_new:
        with contextlib.suppress(OSError):
            os.rmdir(own)
    get_logger().warning(
        "the checkpoint folder %s of this process is not the one with which the job began: using "
        "%s. Pass elastic.join(checkpoints=…) one folder that does not depend on start or node; "
        "for a new job, use another --rdzv-id",
        *(own, jobs),
    )
    return jobs


def _place(root: checkpoints.Root) -> str:
    """The absolute path or the URL of a folder; empty for a storage of the user's own."""
    if isinstance(root, str) and _IN_A_STORE.match(root):
        return root
    storage = storage_for(root)
    return os.path.abspath(storage.place) if isinstance(storage, LocalStorage) else ""


def _create(folder: str) -> bool:
    """Whether the folder did not exist, and does now."""
    try:
        os.makedirs(folder)
    except OSError:  # it exists, or the first save reports why it cannot be created
        return False
    return True


def _is_same_folder(one: str, other: str) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _has_checkpoints(place: str) -> bool:
    try:
        return bool(checkpoints.list_checkpoints(place))
    except (CheckpointError, OSError):
        return False


def _can_be_sent(folder: str) -> bool:
    """Whether a message can carry a path unchanged."""
    try:
        return len(folder.encode()) <= _MAX_PATH_BYTES
    except UnicodeEncodeError:  # a name that is not UTF-8
        return False


def _absolute(place: str) -> str:
    return place if "://" in place else os.path.abspath(place)


def _number(record: bytes | None) -> list[int]:
    try:
        value = json.loads(record or b"")
    except ValueError:  # no record yet, or unreadable
        return []
    return [value] if type(value) is int and 0 <= value < MAX_GENERATION else []


# ----------------------------------------------------------------------------
# The script's configuration of checkpoints: folder, save policy and retention.

EVERY_STEPS = 50
_IN_A_STORE = re.compile(r"(?!(?:file|local)://)[A-Za-z][A-Za-z0-9+.\-]*://")

WhenGiven = SavePolicy | int | None
KeepGiven = RetentionPolicy | int | None


@dataclass(frozen=True)
class Checkpoints:
    """The configuration of checkpoints. ``join(checkpoints="folder")`` uses the defaults.

    ``folder`` is a path on storage that all nodes share, a URL of an object store, or a
    :class:`checkpoints.Storage`. The end of training is always saved. ``memory`` is the number of
    steps between two saves to the nodes' memory. If it is chosen (True, or None with
    ``run.build``), saves take at most ``memory_overhead`` of training time: all ranks compute it
    from the durations of a save and of a step on the slowest rank. Raises ConfigError.

    >>> from checkpoints import EverySeconds, EverySteps, LatestN, EveryNSteps
    >>> policy = Checkpoints("ckpt", when=EverySteps(1000) | EverySeconds(600), keep=2)
    >>> policy.keeping
    LatestN(count=2)
    """

    folder: checkpoints.Root
    _: KW_ONLY
    when: WhenGiven = None  # a checkpoints.SavePolicy, or the steps between two saves (50)
    keep: RetentionPolicy | int = 3  # a policy, or the number of newest checkpoints to keep
    required: bool = False  # refuse to start from step 0 (exit code 65)
    # Steps between two saves to the nodes' memory. True: chosen from the measured costs of a save
    # and a step; None: the same with run.build, else off.
    memory: int | bool | None = None
    memory_overhead: float = 0.01  # fraction of training time for saves to memory, if chosen

    @property
    def local_folder(self) -> str | None:
        """The folder's absolute path; None for an object store.

        Raises :class:`checkpoints.ArgumentError` for an address that names no storage.
        """
        storage = self.folder
        if isinstance(storage, str) and _IN_A_STORE.match(storage):
            return None
        if isinstance(storage, str | os.PathLike):
            storage = storage_for(storage)
        return storage.folder if isinstance(storage, LocalStorage) else None

    def __post_init__(self) -> None:
        if not (isinstance(self.folder, str | os.PathLike) or hasattr(self.folder, "make_folder")):
            raise ConfigError(
                f"checkpoints={described(self.folder)} is no folder, no address and no storage",
                hint='elastic.join(checkpoints="/shared/job-1"), or "s3://bucket/job-1"',
            )
        _check_count("memory", self.memory if self.memory is not False else None)
        if not 0 < self.memory_overhead <= 1:
            raise ConfigError(
                f"memory_overhead={self.memory_overhead} must be above 0 and at most 1",
                hint="0.01: saves to the nodes' memory take at most 1 % of training time",
            )
        _check("when", self.when, SavePolicy, "EverySteps(100), EverySeconds(600), Automatic()")
        _check("keep", self.keep, RetentionPolicy, "LatestN(3), LatestN(2) | EveryNSteps(1000)")

    @property
    def saving(self) -> SavePolicy:
        """The save policy.

        Raises :class:`checkpoints.ArgumentError` for a number of steps below 1.
        """
        if isinstance(self.when, SavePolicy):
            return self.when
        return EverySteps(self.when or EVERY_STEPS)

    @property
    def memory_steps(self) -> int | None:
        """Steps between two saves to memory, if given; None: chosen, or disabled."""
        return None if isinstance(self.memory, bool) else self.memory

    @property
    def keeping(self) -> RetentionPolicy:
        """The retention policy.

        Raises :class:`checkpoints.ArgumentError` for a number below 1.
        """
        return self.keep if isinstance(self.keep, RetentionPolicy) else LatestN(self.keep)

    def amended(
        self, given: Checkpoints | checkpoints.Root | None, when: WhenGiven, keep: KeepGiven
    ) -> Checkpoints:
        """A copy with the arguments of ``run.steps``.

        Raises TrainingError for another folder: it is too late to change it. Raises ConfigError
        for policies given twice.
        """
        folder = given.folder if isinstance(given, Checkpoints) else given
        if folder is not None and not _is_same(folder, self.folder):
            raise TrainingError(
                f"checkpoints={_shown(folder)}, but this job saves to {_shown(self.folder)}",
                hint="set one folder, in elastic.join(checkpoints=…)",
            )
        if isinstance(given, Checkpoints):
            return _without_overrides(given, when, keep)
        policy = self
        if when is not None:
            policy = dataclasses.replace(policy, when=when)
        if keep is not None:
            policy = dataclasses.replace(policy, keep=keep)
        return policy


def checkpoints_from(
    given: Checkpoints | checkpoints.Root | None,
    env: Mapping[str, str] = os.environ,
    *,
    when: WhenGiven = None,
    keep: KeepGiven = None,
) -> Checkpoints | None:
    """Use ``join``'s argument, else ``ELASTIC_CHECKPOINTS``, else None: nothing is saved.

    Raises ConfigError for policies without a folder, and for policies given twice.
    """
    if isinstance(given, Checkpoints):
        return _without_overrides(given, when, keep)
    folder = given if given is not None else env.get("ELASTIC_CHECKPOINTS") or None
    if folder is not None:
        return Checkpoints(folder).amended(None, when, keep)
    if when is not None or keep is not None:
        raise ConfigError(
            f"when={when}, keep={keep} without a checkpoint folder",
            hint="pass join(checkpoints=…), or set ELASTIC_CHECKPOINTS",
        )
    return None


def _without_overrides(given: Checkpoints, when: WhenGiven, keep: KeepGiven) -> Checkpoints:
    if when is not None or keep is not None:
        raise ConfigError(
            f"when={when}, keep={keep} in addition to checkpoints=Checkpoints(…)",
            hint="pass them to Checkpoints(folder, when=…, keep=…)",
        )
    return given


def _check(name: str, value: object, policy: type[object], examples: str) -> None:
    if value is None or isinstance(value, policy):
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(
            f"{name}={value!r} is neither an integer nor a policy",
            hint=f"from checkpoints import …: {examples}; policies are combined with |",
        )
    _check_count(name, value)


def _check_count(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name}={value} must be at least 1")


def _is_same(one: checkpoints.Root, other: checkpoints.Root) -> bool:
    if isinstance(one, (str, os.PathLike)) and isinstance(other, (str, os.PathLike)):
        return os.fspath(one) == os.fspath(other)
    return one is other


def _shown(root: object) -> str:
    place = root if isinstance(root, (str, os.PathLike)) else getattr(root, "place", root)
    return str(place)
