"""Checkpoints for PyTorch that are listed only once they are complete and durable.

An independent library for any PyTorch program. Every rank writes its share, the rank that finds all
shares commits, and no rank waits for another. Loading verifies every byte before it changes a
tensor. :mod:`checkpoints.errors` has the exceptions; start reading at
:mod:`checkpoints.saving` and :mod:`checkpoints.loading`.

>>> import checkpoints, tempfile, torch
>>> folder, weight = tempfile.mkdtemp(), torch.ones(2)
>>> saved = checkpoints.save(folder, {"weight": weight, "lr": 0.1}, step=7, nonce="3f9c")
>>> saved.name, saved.committed
('step-000000007.g0.3f9c', True)
>>> newest = checkpoints.latest(folder).checkpoint
>>> checkpoints.load(folder, newest.name).state
{'weight': tensor([1., 1.]), 'lr': 0.1}
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkpoints.engine import Engine
    from checkpoints.errors import (
        ArgumentError,
        CheckpointError,
        CheckpointNotFound,
        CorruptCheckpoint,
        DiskFull,
        LoadError,
        NameTaken,
        NotWritable,
        ReadFailed,
        SaveError,
        StateError,
        StateMismatch,
        TornRead,
        UnsupportedFormat,
        WriteFailed,
    )
    from checkpoints.garbage import GarbageCollectionResult, RetainedAttempt, collect_garbage
    from checkpoints.loading import (
        LoadResult,
        Resolution,
        SkippedCheckpoint,
        latest,
        list_checkpoints,
        load,
        verify,
    )
    from checkpoints.manifest import Ancestor, CheckpointInfo, Lineage, derive_lineage
    from checkpoints.memory import NodeMemory
    from checkpoints.names import CheckpointName, new_nonce
    from checkpoints.objects import Root
    from checkpoints.policies import (
        Automatic,
        BestN,
        Continuous,
        EveryNSeconds,
        EveryNSteps,
        EverySeconds,
        EverySteps,
        LatestN,
        OnPreemption,
        RetentionFunction,
        RetentionPolicy,
        SaveContext,
        SavePolicy,
    )
    from checkpoints.saving import (
        SaveHandle,
        SaveOutcome,
        SaveResult,
        SaveStatus,
        WriterGroup,
        save,
    )
    from checkpoints.storage import LocalStorage, Storage
    from checkpoints.tiers import TieredStorage, TierFailure
    from checkpoints.tools import Difference, compare, export_to, import_from, prune

__all__ = [
    "Ancestor",
    "ArgumentError",
    "Automatic",
    "BestN",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointName",
    "CheckpointNotFound",
    "Continuous",
    "CorruptCheckpoint",
    "Difference",
    "DiskFull",
    "Engine",
    "EveryNSeconds",
    "EveryNSteps",
    "EverySeconds",
    "EverySteps",
    "GarbageCollectionResult",
    "LatestN",
    "Lineage",
    "LoadError",
    "LoadResult",
    "LocalStorage",
    "NameTaken",
    "NodeMemory",
    "NotWritable",
    "OnPreemption",
    "ReadFailed",
    "Resolution",
    "RetainedAttempt",
    "RetentionFunction",
    "RetentionPolicy",
    "Root",
    "SaveContext",
    "SaveError",
    "SaveHandle",
    "SaveOutcome",
    "SavePolicy",
    "SaveResult",
    "SaveStatus",
    "SkippedCheckpoint",
    "StateError",
    "StateMismatch",
    "Storage",
    "TierFailure",
    "TieredStorage",
    "TornRead",
    "UnsupportedFormat",
    "WriteFailed",
    "WriterGroup",
    "collect_garbage",
    "compare",
    "derive_lineage",
    "export_to",
    "import_from",
    "latest",
    "list_checkpoints",
    "load",
    "new_nonce",
    "prune",
    "save",
    "verify",
]

# Imported when they are used: what reads no tensors does not import torch, which takes a second.
_HOMES = {
    "Ancestor": "checkpoints.manifest",
    "ArgumentError": "checkpoints.errors",
    "Automatic": "checkpoints.policies",
    "BestN": "checkpoints.policies",
    "CheckpointError": "checkpoints.errors",
    "CheckpointInfo": "checkpoints.manifest",
    "CheckpointName": "checkpoints.names",
    "CheckpointNotFound": "checkpoints.errors",
    "Continuous": "checkpoints.policies",
    "CorruptCheckpoint": "checkpoints.errors",
    "Difference": "checkpoints.tools",
    "DiskFull": "checkpoints.errors",
    "Engine": "checkpoints.engine",
    "EveryNSeconds": "checkpoints.policies",
    "EveryNSteps": "checkpoints.policies",
    "EverySeconds": "checkpoints.policies",
    "EverySteps": "checkpoints.policies",
    "GarbageCollectionResult": "checkpoints.garbage",
    "LatestN": "checkpoints.policies",
    "Lineage": "checkpoints.manifest",
    "LoadError": "checkpoints.errors",
    "LoadResult": "checkpoints.loading",
    "LocalStorage": "checkpoints.storage",
    "NameTaken": "checkpoints.errors",
    "NodeMemory": "checkpoints.memory",
    "NotWritable": "checkpoints.errors",
    "OnPreemption": "checkpoints.policies",
    "ReadFailed": "checkpoints.errors",
    "Resolution": "checkpoints.loading",
    "RetainedAttempt": "checkpoints.garbage",
    "RetentionFunction": "checkpoints.policies",
    "RetentionPolicy": "checkpoints.policies",
    "Root": "checkpoints.objects",
    "SaveContext": "checkpoints.policies",
    "SaveError": "checkpoints.errors",
    "SaveHandle": "checkpoints.saving",
    "SaveOutcome": "checkpoints.saving",
    "SavePolicy": "checkpoints.policies",
    "SaveResult": "checkpoints.saving",
    "SaveStatus": "checkpoints.saving",
    "SkippedCheckpoint": "checkpoints.loading",
    "StateError": "checkpoints.errors",
    "StateMismatch": "checkpoints.errors",
    "Storage": "checkpoints.storage",
    "TierFailure": "checkpoints.tiers",
    "TieredStorage": "checkpoints.tiers",
    "TornRead": "checkpoints.errors",
    "UnsupportedFormat": "checkpoints.errors",
    "WriteFailed": "checkpoints.errors",
    "WriterGroup": "checkpoints.saving",
    "collect_garbage": "checkpoints.garbage",
    "compare": "checkpoints.tools",
    "derive_lineage": "checkpoints.manifest",
    "export_to": "checkpoints.tools",
    "import_from": "checkpoints.tools",
    "latest": "checkpoints.loading",
    "list_checkpoints": "checkpoints.loading",
    "load": "checkpoints.loading",
    "new_nonce": "checkpoints.names",
    "prune": "checkpoints.tools",
    "save": "checkpoints.saving",
    "verify": "checkpoints.loading",
}


if not TYPE_CHECKING:  # or names that mypy has not resolved yet would be of any type

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'checkpoints' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(home), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
