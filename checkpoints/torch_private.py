"""The private names of torch that this package uses, each looked up where it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints.errors import CheckpointError

if TYPE_CHECKING:
    import torch


def storage_of(tensor: torch.Tensor) -> int:
    """An identifier of the tensor's storage; unlike an address, an empty storage has one."""
    return int(tensor.untyped_storage()._cdata)


def load_dcp(path: Path) -> dict[str, Any]:
    """Everything that ``torch.distributed.checkpoint`` saved in a folder.

    There is no public API to load without a template state; torch's own ``format_utils`` use the
    same private names. Raises CheckpointError if the installed torch has renamed them.
    """
    import torch

    try:
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
    except ImportError as error:
        raise CheckpointError(
            f"torch {torch.__version__} cannot load {path}: {error}",
            hint="Convert it with the version of torch that wrote it.",
        ) from error
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(path),
        planner=_EmptyStateDictLoadPlanner(),  # type: ignore[no-untyped-call]
        no_dist=True,
    )
    return state


def load_dcp_leaves(path: Path, key: str) -> tuple[Any, dict[tuple[object, ...], torch.Tensor]]:
    """One top-level value of a state that ``torch.distributed.checkpoint`` saved, and all tensors
    by path; None if there is no such value.

    Unlike :func:`load_dcp`, it does not rebuild the containers: DCP cannot read back some that it
    writes, such as a list with an empty dict.
    """
    import torch
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    entries = FileSystemReader(path).read_metadata()
    if key not in entries.state_dict_metadata:
        return None, {}
    flat: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        for name, entry in entries.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    names = list(flat)
    flat[key] = ""
    load(
        flat,
        checkpoint_id=path,
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        no_dist=True,
    )
    paths = entries.planner_data or {}
    return flat[key], {tuple(paths.get(name, (name,))): flat[name] for name in names}
