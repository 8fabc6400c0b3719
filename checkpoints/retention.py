"""Updates LATEST and removes old checkpoints after a commit.

Nothing here fails a save: the checkpoint is committed already, and each failure is a note. What
could not be removed is removed after a later commit. A checkpoint is renamed before its removal, so
that a partly removed one is never listed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from checkpoints.commit import (
    IncompleteAttempt,
    committed_in,
    committed_names,
    read_document,
    read_manifest,
    world_size_of,
)
from checkpoints.errors import LoadError, ReadFailed, UnsupportedFormat
from checkpoints.manifest import (
    Manifest,
    as_text,
    decode,
    encode,
    parse_without_tensors,
    without_tensors,
)
from checkpoints.names import (
    LATEST,
    LATEST_PREFIX,
    MANIFEST,
    REMOVED_PREFIX,
    SUMMARIES,
    CheckpointName,
    parse_attempt,
    parse_committed,
)
from checkpoints.objects import ObjectStorage
from checkpoints.policies import RetentionFunction, Validity, to_remove
from checkpoints.storage import (
    PatientStorage,
    Storage,
    patient,
    reason_of,
    removed_on_failure,
    write_durably,
)


@runtime_checkable
class PartStorage(Protocol):
    """A storage that holds parts but commits nothing; readers merge the parts of several
    storages."""

    def make_room(self, name: CheckpointName, size_bytes: int) -> None:
        """Called before a part is added: remove older parts while it does not fit."""
        ...

    def remove_if_empty(self, name: CheckpointName) -> None:
        """Called after a failed write: remove the folder, unless another writer has parts there.
        Raises nothing."""
        ...

    def part_written(self, name: CheckpointName, keep: RetentionFunction | None) -> tuple[str, ...]:
        """Called after a part is added: remove parts that ``keep`` does not retain; returns
        notes."""
        ...


class FolderHistory:
    """What a writer knows about a folder from its earlier commits.

    It detects that another run saves into the same folder. Runs have different nonces; one that
    begins with the nonce of a world is of that world, one of whose writers has saved alone. A
    checkpoint of another run in the same generation that appears after this writer's first commit
    is of a run that is active at the same time; what is there before may be of the run that this
    one resumes.
    """

    def __init__(self) -> None:
        self.valid: set[CheckpointName] = set()  # those that it has committed, or checked before
        # What policies ask for, without the tensors: a commit must not read the manifests of all
        # checkpoints again.
        self.manifests: dict[CheckpointName, Manifest] = {}
        self.summaries = _Summaries()
        self._own: set[str] = set()
        self._known: set[CheckpointName] | None = None

    def of(self, nonce: str) -> FolderHistory:
        """Note the nonce of one of this run's worlds; returns this object."""
        self._own.add(nonce)
        return self

    def remember(self, manifest: Manifest) -> Manifest:
        """Note that a checkpoint is valid; returns its manifest without the tensors."""
        self.valid.add(manifest.name)
        self.manifests[manifest.name] = kept = without_tensors(manifest)
        return kept

    def forget_others(self, names: Collection[CheckpointName]) -> None:
        """Keep only what is known about ``names``: the others were removed."""
        self.valid.intersection_update(names)
        self.manifests = {n: m for n, m in self.manifests.items() if n in names}
        self.summaries.keep(names)

    def note_other_runs(self, committed: Sequence[CheckpointName], name: CheckpointName) -> str:
        """A note if another run has committed since the last call, else ``""``."""
        others = {
            other
            for other in committed
            if other.generation == name.generation
            and not other.nonce.startswith((*self._own, name.nonce))
        }
        new = others - self._known if self._known is not None else None
        self._known = others
        if not new:
            return ""
        return (
            f"{max(new, key=lambda other: other.step)} was saved by another run: runs that save "
            "into one folder remove each other's checkpoints. Give each a folder of its own"
        )


def after_commit(
    storage: Storage,
    name: CheckpointName,
    keep: RetentionFunction | None,
    history: FolderHistory | None = None,
) -> tuple[str, ...]:
    """Update LATEST, remove checkpoints that ``keep`` does not retain and superseded attempts;
    returns notes.

    The checkpoint that was just committed is retained, even if the folder has newer ones.
    """
    history = history or FolderHistory()
    history.valid.add(name)
    notes: list[str] = []

    @contextlib.contextmanager
    def noted(what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            notes.append(f"{name} is committed, but {what} failed: {reason_of(error)}")
        except Exception as error:  # noqa: BLE001  of the user's policy
            notes.append(f"{name} is committed, but {what} failed: {error!r}")

    with noted("listing older checkpoints"):
        # Once: an object store lists the objects of each checkpoint.
        entries = patient(storage).list("")
        names = committed_in({str(name), *entries})  # a new name may be listed after a delay
        with noted(f"writing {LATEST}"):
            _point_latest(storage, names[0])
        notes += filter(None, (_newer_run(names[0], name), history.note_other_runs(names, name)))
        removable: Sequence[CheckpointName] = ()
        if keep is not None:
            history.summaries.read(storage)
        with noted("choosing the checkpoints to keep"):
            removable = not_retained(storage, names, keep, history)
        remaining = set(names)
        for old in removable:
            if old != name:
                with noted(f"removing {old}"):
                    remove_committed(storage, old)
                    remaining.remove(old)
        history.forget_others(remaining)
        if keep is not None:
            with noted(f"writing {SUMMARIES}"):
                history.summaries.write(storage, history.manifests)
        for folder in _superseded(entries, name):
            with noted(f"removing {folder}"):
                storage.remove_folder(folder)
    return tuple(notes)


def _newer_run(newest: CheckpointName, name: CheckpointName) -> str:
    """A note if the folder's newest checkpoint is of another run of the same generation."""
    if newest.nonce.startswith(name.nonce) or newest.generation != name.generation:
        return ""
    return (
        f"{newest} of another run counts as newer than {name}: latest() returns it, and only the "
        "last checkpoint of this run is kept. Resume from it, or save into another folder"
    )


def not_retained(
    storage: Storage,
    newest_first: Sequence[CheckpointName],
    keep: RetentionFunction | None,
    history: FolderHistory | None = None,
) -> tuple[CheckpointName, ...]:
    """The committed checkpoints that ``keep`` does not retain, oldest first; None retains all. A
    checkpoint counts as valid if its manifest is intact and its files have the right sizes.

    ``history``: what was checked earlier is not read again. Only after a commit: that checkpoint
    is then intact, whatever has happened to the others since.
    """
    if keep is None:
        return ()

    @functools.cache
    def look(name: CheckpointName) -> Manifest | LoadError:
        try:
            if history is None:
                return read_manifest(patient(storage), str(name), parse_without_tensors)
            if (known := history.manifests.get(name)) is not None:
                return known
            return history.remember(_manifest_of(storage, name, history.summaries))
        except LoadError as error:
            return error

    def manifest_of(name: CheckpointName) -> Manifest | None:
        info = look(name)
        return None if isinstance(info, LoadError) else info

    def validity(name: CheckpointName) -> Validity:
        if history is not None and name in history.valid:
            return Validity.VALID
        info = look(name)
        return validity_of(info) if isinstance(info, LoadError) else Validity.VALID

    return to_remove(newest_first, keep, manifest_of, validity)


def _manifest_of(storage: Storage, name: CheckpointName, summaries: _Summaries) -> Manifest:
    """The manifest of a committed checkpoint, without its tensors. Raises :class:`LoadError`.

    Read once in a process while the file is unchanged: writers that each save once, such as
    :func:`checkpoints.save`, would otherwise read the manifests of all checkpoints each time.
    """
    changed_s = _changed_s(storage, name)
    key = (storage.place, str(name), changed_s)
    manifest = _READ.get(key)
    if manifest is None:
        manifest = summaries.manifest_of(storage, name, changed_s)
    if manifest is None:
        manifest = read_manifest(patient(storage), str(name), parse_without_tensors)
    if key not in _READ and 0 < changed_s < math.inf:
        with _READ_LOCK:
            _READ[key] = manifest
            if len(_READ) > _MAX_READ:
                del _READ[next(iter(_READ))]
    return manifest


def _changed_s(storage: Storage, name: CheckpointName) -> float:
    """When the manifest of a checkpoint was written; 0.0 if that is unknown. Not asked for in an
    object store, where an object is put once, as a whole."""
    if _is_object_store(storage):
        return 1.0
    with contextlib.suppress(OSError):
        return storage.modified_s(f"{name}/{MANIFEST}")
    return 0.0


def _is_object_store(storage: Storage) -> bool:
    inner = storage.inner if isinstance(storage, PatientStorage) else storage
    return isinstance(inner, ObjectStorage)


_MAX_READ = 1024
_READ: dict[tuple[str, str, float], Manifest] = {}  # by place, name and time of the last change
_READ_LOCK = threading.Lock()


_MAX_SUMMARIES_BYTES = 16 << 20  # those of the newest checkpoints: 100 of 1,000 writers


class _Summaries:
    """The manifests of a folder's checkpoints without their tensors, in one file beside them.

    Another process would otherwise read the manifest of each checkpoint at its first commit. A
    summary replaces a manifest that has not changed since, and whose files have their sizes: the
    manifest is read where that is not known. A file that is damaged, or half written by another
    process, has a wrong checksum and counts as missing.
    """

    def __init__(self) -> None:
        self._texts: dict[str, tuple[float, str]] = {}  # by name: when it was written, and its text
        self._is_changed = False

    def read(self, storage: Storage) -> None:
        """Read the file again: other writers add to it."""
        with contextlib.suppress(OSError, LoadError, ValueError, TypeError, AttributeError):
            source = storage.open(SUMMARIES)
            with contextlib.closing(source):
                fields = decode(read_document(source, SUMMARIES), SUMMARIES, {})
            texts = {n: (float(changed_s), str(t)) for n, (changed_s, t) in fields.items()}
            self._is_changed = any(texts.get(name) != text for name, text in self._texts.items())
            self._texts = texts | self._texts

    def manifest_of(
        self, storage: Storage, name: CheckpointName, changed_s: float
    ) -> Manifest | None:
        """The manifest of a checkpoint that is valid and whose manifest was written then."""
        known_s, text = self._texts.get(str(name), (math.nan, ""))
        with contextlib.suppress(LoadError, OSError):
            manifest = parse_without_tensors(text.encode(), SUMMARIES)
            sizes = {f"{name}/{writer.file}": writer.size_bytes for writer in manifest.writers}
            is_same = manifest.name == name and known_s == changed_s
            if is_same and (
                _is_object_store(storage)
                or all(storage.size(file) == size for file, size in sizes.items())
            ):
                return manifest
        self._texts.pop(str(name), None)
        return None

    def keep(self, names: Collection[CheckpointName]) -> None:
        """Forget the summaries of all other checkpoints."""
        kept = set(map(str, names))
        known = len(self._texts)
        self._texts = {name: text for name, text in self._texts.items() if name in kept}
        self._is_changed |= len(self._texts) < known

    def write(self, storage: Storage, manifests: Mapping[CheckpointName, Manifest]) -> None:
        """Write the file, with the summaries of these manifests. Raises ``OSError``."""
        for name, manifest in manifests.items():
            changed_s = 0.0 if str(name) in self._texts else _changed_s(storage, name)
            if 0 < changed_s < math.inf:
                self._texts[str(name)] = (changed_s, manifest.to_bytes().decode())
                self._is_changed = True
        if not self._is_changed:
            return
        # Not durably, and in place: it is not needed, and a half-written one is not used.
        sink = storage.create(SUMMARIES)
        try:
            sink.write(encode({name: iter((as_text(t),)) for name, t in self._newest()}))
        finally:
            sink.close()
        self._is_changed = False

    def _newest(self) -> Iterator[tuple[str, tuple[float, str]]]:
        left_bytes = _MAX_SUMMARIES_BYTES
        for name in sorted(self._texts, key=_age_order, reverse=True):
            left_bytes -= len(self._texts[name][1])
            if left_bytes > 0:
                yield name, self._texts[name]


def _age_order(name: str) -> tuple[int, int, str]:
    parsed = parse_committed(name)
    return parsed.age_order if parsed is not None else (-1, -1, name)


def validity_of(error: LoadError) -> Validity:
    """What a failed read says about a checkpoint."""
    is_unknown = isinstance(error, (ReadFailed, UnsupportedFormat))
    return Validity.UNKNOWN if is_unknown else Validity.DAMAGED


def remove_committed(storage: Storage, name: CheckpointName) -> None:
    """Remove a committed checkpoint. Safe against concurrent removal."""
    try:
        storage.rename(str(name), name.removed)
    except FileNotFoundError:
        return
    storage.remove_folder(name.removed)


def _point_latest(storage: Storage, newest: CheckpointName) -> None:
    """Write LATEST, for users and scripts; this package never loads by it."""
    temporary = f"{LATEST_PREFIX}{secrets.token_hex(4)}"
    with removed_on_failure(storage, temporary):
        write_durably(storage, temporary, f"{newest}\n".encode("ascii"))
        storage.rename(temporary, LATEST)


def free_space(
    storage: Storage, name: CheckpointName, keep: RetentionFunction | None
) -> Iterator[None]:
    """Free the space of a full disk for a save of ``name``, step by step: what it supersedes, what
    ``keep`` does not retain, and complete attempts of earlier worlds. Yields after each step that
    has removed something. Raises nothing.

    A commit removes all of it, too. But a disk that has filled up while that failed, or under a
    policy that keeps more, has no space for the next commit.
    """
    if remove_superseded(storage, name):
        yield
    if _remove_not_retained(storage, keep):
        yield
    if remove_superseded(storage, name, spares_complete=False):
        yield


def _remove_not_retained(storage: Storage, keep: RetentionFunction | None) -> bool:
    """Whether checkpoints were removed. The next commit notes what fails here, such as the user's
    policy."""
    is_freed = False
    with contextlib.suppress(Exception):
        for old in not_retained(storage, committed_names(patient(storage)), keep):
            with contextlib.suppress(OSError):
                remove_committed(storage, old)
                is_freed = True
    return is_freed


def remove_superseded(
    storage: Storage, name: CheckpointName, *, spares_complete: bool = True
) -> bool:
    """Remove the attempts that a save of ``name`` supersedes; returns whether there were some.
    Raises nothing.

    ``spares_complete``: not those of earlier worlds that have all parts. One may be the newest
    state, which the collection at the start could not commit; the next one may.
    """
    is_freed = False
    with contextlib.suppress(OSError):
        for folder in _superseded(storage.list(""), name):
            with contextlib.suppress(OSError):
                attempt = parse_attempt(folder)
                is_earlier = attempt is not None and attempt.generation < name.generation
                if spares_complete and is_earlier and _is_complete(storage, folder):
                    continue
                storage.remove_folder(folder)
                is_freed = True
    return is_freed


def _is_complete(storage: Storage, attempt: str) -> bool:
    """Whether the parts of all writers are there."""
    try:
        return world_size_of(storage.list(attempt)) > 0
    except IncompleteAttempt:
        return False


def _superseded(entries: Sequence[str], name: CheckpointName) -> Iterator[str]:
    """Attempts of earlier worlds, which have ended, and of the same world at earlier steps: they
    will not be completed. And interrupted removals."""
    for entry in entries:
        attempt = parse_attempt(entry)
        if attempt is not None:
            is_same_world = (attempt.generation, attempt.nonce) == (name.generation, name.nonce)
            is_superseded = attempt.generation < name.generation
            is_superseded |= is_same_world and attempt.step < name.step
        else:
            is_superseded = entry.startswith(REMOVED_PREFIX)
        if is_superseded:
            yield entry
