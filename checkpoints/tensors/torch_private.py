"""Every private name of torch that checkpoints lean on; each is looked for where it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from checkpoints.errors import CheckpointError


def storage_of(tensor: torch.Tensor) -> int:
    """A number of the tensor's storage, also of an empty one, which has no address."""
    return int(tensor.untyped_storage()._cdata)


def load_dcp(path: Path) -> dict[str, Any]:
    """All that ``torch.distributed.checkpoint`` has saved in a folder.

    There is no public way to load what one has no state for; torch's own ``format_utils`` do it
    like this. Raises CheckpointError where the installed torch has other names.
    """
    try:
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
    except ImportError as error:
        raise CheckpointError(
            f"torch {torch.__version__} cannot load {path}: {error}",
            hint="convert it with the torch that has written it",
        ) from error
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(path),
        planner=_EmptyStateDictLoadPlanner(),  # type: ignore[no-untyped-call]
        no_dist=True,
    )
    return state
