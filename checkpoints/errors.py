"""The exceptions of this package.

::

    CheckpointError
    ├── SaveError                   a save failed; older checkpoints are unchanged
    │   ├── NotWritable             the folder is not writable (permission, read-only, not a folder)
    │   ├── DiskFull                no space: ENOSPC, EDQUOT, or a limit on file size
    │   ├── NameTaken               another state is already saved under this name
    │   └── WriteFailed             any other failure of the storage
    ├── StateError (TypeError)      the state contains a value that cannot be saved
    ├── LoadError                   a load failed; live tensors are unchanged
    │   ├── CheckpointNotFound      there is no such checkpoint
    │   ├── CorruptCheckpoint       it is damaged; names the file, and the tensor if there is one
    │   ├── ReadFailed              the storage failed while reading
    │   ├── UnsupportedFormat       a newer version of this package wrote it
    │   ├── StateMismatch           the live state does not match; lists the differences
    │   └── TornRead                its files changed during the load; live tensors are inconsistent
    └── ArgumentError (ValueError)  an invalid step, nonce, rank, lineage or policy

The message states what happened and where; ``hint`` what to do.
"""

from __future__ import annotations


class CheckpointError(Exception):
    """Base class. ``str()`` is the message, followed by the hint on its own line."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message


class ArgumentError(CheckpointError, ValueError):
    """An invalid step, nonce, rank, lineage or policy. Nothing was written."""


class StateError(CheckpointError, TypeError):
    """The state contains a value that cannot be saved. The message has its path."""


class SaveError(CheckpointError):
    """A save failed. Older checkpoints are unchanged."""


class NotWritable(SaveError):
    """The folder cannot be written: permission, read-only, or not a folder."""


class DiskFull(SaveError):
    """There is no space for the checkpoint."""


class NameTaken(SaveError):
    """Another state is already saved under this step, generation and nonce. Nothing was written."""


class WriteFailed(SaveError):
    """The storage failed while writing."""


class LoadError(CheckpointError):
    """A load failed. Live tensors are unchanged.

    Exceptions: :class:`TornRead`, and a process group that failed at the very end of a collective
    load, as the hint then says.

    ``rank``: in a collective load, the other rank that has failed; None: this one.
    """

    rank: int | None = None


class CheckpointNotFound(LoadError):
    """There is no such checkpoint."""


class ReadFailed(LoadError):
    """The storage failed while reading."""


class UnsupportedFormat(LoadError):
    """A newer version of this package wrote the checkpoint."""


class CorruptCheckpoint(LoadError):
    """A checkpoint is damaged or inconsistent.

    ``file`` is relative to the root; ``tensor`` is None unless one tensor is affected.
    """

    def __init__(self, reason: str, *, file: str, tensor: str | None = None) -> None:
        where = f"{file}, tensor {tensor!r}" if tensor is not None else file
        super().__init__(
            f"damaged checkpoint: {where}: {reason}",
            hint="Load an older checkpoint; latest() finds the newest valid one.",
        )
        self.reason = reason
        self.file = file
        self.tensor = tensor


class StateMismatch(LoadError):
    """The checkpoint does not match the tensors to load it into."""

    def __init__(
        self,
        name: str,
        *,
        missing: tuple[str, ...],
        extra: tuple[str, ...],
        mismatched: tuple[str, ...],
    ) -> None:
        lines = [f"{name} does not match the tensors to load it into; nothing was changed"]
        for title, names in (
            ("missing in the checkpoint", missing),
            ("only in the checkpoint", extra),
            ("different shape or dtype", mismatched),
        ):
            if names:
                more = f" … and {len(names) - 20} more" if len(names) > 20 else ""
                lines.append(f"  {title}: {', '.join(names[:20])}{more}")
        super().__init__(
            "\n".join(lines),
            hint="Load it into the model it was saved from, or pass strict=False.",
        )
        self.missing = missing
        self.extra = extra
        self.mismatched = mismatched


class TornRead(LoadError):
    """Files of a checkpoint changed between verification and copy.

    Live tensors are inconsistent. Only a write into a committed checkpoint on a memory file system
    during the load causes this.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} changed while it was loaded, after its verification; "
            "the live tensors are inconsistent",
            hint="Load another checkpoint before continuing. This package never writes into a "
            "committed one: find the process that does.",
        )
