"""Every error this package raises on purpose.

::

    CheckpointError ├── SaveError                 a save failed; older checkpoints are as they were
    │   ├── NotWritable           the folder cannot be written (permission, read-only, not a folder)
    │   ├── DiskFull              no room: ENOSPC, EDQUOT, or a limit on file size │   └──
    WriteFailed           anything else the storage said ├── StateError (TypeError)    the state
    holds what a checkpoint cannot hold ├── LoadError                 a load failed; live tensors
    are as they were │   ├── CheckpointNotFound          there is no such checkpoint │   ├──
    CorruptCheckpoint               it is damaged; names the file, and the tensor if there is one │
    ├── ReadFailed            the storage failed while reading │   ├── UnsupportedFormat     a newer
    version of this package wrote it │   ├── Mismatch              it is of another model; lists
    what differs │   └── TornRead              its files changed while it was loaded; live tensors
    are mixed └── ArgumentError (ValueError)  a step, nonce, rank or lineage that cannot be

The message says what happened and where; ``hint`` says what to do.
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Base of the tree. ``str()`` is the message, followed by the hint on a line of its own."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class ArgumentError(CheckpointError, ValueError):
    """A step, nonce, rank, lineage or policy that cannot be; nothing was written."""


class StateError(CheckpointError, TypeError):
    """The state holds what a checkpoint cannot hold. Names the place in the state."""


class SaveError(CheckpointError):
    """A save failed. Older checkpoints are as they were."""


class NotWritable(SaveError):
    """The folder cannot be written: permission, read-only, or not a folder."""


class DiskFull(SaveError):
    """There is no room for the checkpoint."""


class WriteFailed(SaveError):
    """The storage failed while writing."""


class LoadError(CheckpointError):
    """A load failed. Live tensors are as they were.

    Not after TornRead, and not where the hint says something else: when the group of ranks that
    load together broke at the very end.
    """


class CheckpointNotFound(LoadError):
    """There is no such checkpoint."""


class ReadFailed(LoadError):
    """The storage failed while reading."""


class UnsupportedFormat(LoadError):
    """A newer version of this package wrote the checkpoint."""


class CorruptCheckpoint(LoadError):
    """A checkpoint is damaged, or not what it says it is.

    ``file`` is relative to the root; ``tensor`` is None where the damage hits no tensor (or all).
    """

    def __init__(self, reason: str, *, file: str, tensor: str | None = None) -> None:
        where = f"{file}, tensor {tensor!r}" if tensor is not None else file
        super().__init__(
            f"damaged checkpoint: {where}: {reason}",
            hint="Load an older checkpoint; latest() finds the newest that is whole.",
        )
        self.reason = reason
        self.file = file
        self.tensor = tensor


class StateMismatch(LoadError):
    """The checkpoint is of another model than the tensors it was to be loaded into."""

    def __init__(
        self,
        name: str,
        *,
        missing: tuple[str, ...],
        extra: tuple[str, ...],
        mismatched: tuple[str, ...],
    ) -> None:
        lines = [f"{name} does not fit the tensors it was to be loaded into; nothing was changed"]
        for title, names in (
            ("missing in the checkpoint", missing),
            ("only in the checkpoint", extra),
            ("of another shape or dtype", mismatched),
        ):
            if names:
                more = f" … and {len(names) - 20} more" if len(names) > 20 else ""
                lines.append(f"  {title}: {', '.join(names[:20])}{more}")
        super().__init__(
            "\n".join(lines),
            hint="Load it into the model that it was saved from, or pass strict=False.",
        )
        self.missing = missing
        self.extra = extra
        self.mismatched = mismatched


class TornRead(LoadError):
    """Files of a checkpoint changed between their verification and their use.

    Live tensors hold parts of it then. It takes somebody who writes into a committed checkpoint
    on a memory file system in the very moment of a load.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} changed while it was loaded: it was whole a moment ago; "
            "the live tensors hold parts of it",
            hint="Load another checkpoint before you go on. Nothing here writes into a committed "
            "one: find out who does.",
        )
