"""Checkpoints for PyTorch that are listed only once they are complete and durable.

An independent library for any PyTorch program. Every rank writes its share, the rank that finds all
shares commits, and no rank waits for another. Loading verifies every byte before it changes a
tensor. :mod:`checkpoints.errors` has the exceptions; start reading at
:mod:`checkpoints.saving.save` and :mod:`checkpoints.loading.load`.

>>> import checkpoints, tempfile, torch
>>> folder, weight = tempfile.mkdtemp(), torch.ones(2)
>>> saved = checkpoints.save(folder, {"weight": weight, "lr": 0.1}, step=7, nonce="3f9c")
>>> saved.name, saved.committed
('step-000000007.g0.3f9c', True)
>>> newest = checkpoints.latest(folder).checkpoint
>>> checkpoints.load(folder, newest.name).state
{'weight': tensor([1., 1.]), 'lr': 0.1}
"""

from checkpoints.catalog.garbage import GarbageCollectionResult, RetainedAttempt, collect_garbage
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
from checkpoints.format.lineage import derive_lineage
from checkpoints.format.manifest import Ancestor, CheckpointInfo, Lineage
from checkpoints.format.names import CheckpointName, new_nonce
from checkpoints.loading.load import LoadResult, load, verify
from checkpoints.loading.resolve import Resolution, SkippedCheckpoint, latest, list_checkpoints
from checkpoints.loading.tiered_storage import TieredStorage, TierFailure
from checkpoints.memory.node_memory import NodeMemory
from checkpoints.policies.retention import (
    BestN,
    EveryNSeconds,
    EveryNSteps,
    LatestN,
    RetentionFunction,
    RetentionPolicy,
)
from checkpoints.policies.save import (
    Automatic,
    Continuous,
    EverySeconds,
    EverySteps,
    OnPreemption,
    SaveContext,
    SavePolicy,
)
from checkpoints.saving.attempt import SaveResult
from checkpoints.saving.engine import Engine
from checkpoints.saving.outcome import SaveHandle, SaveOutcome, SaveStatus, WriterGroup
from checkpoints.saving.save import save
from checkpoints.saving.tiered_engine import Tier, TieredEngine, TierOutcome
from checkpoints.storage.local import LocalStorage
from checkpoints.storage.protocol import Storage
from checkpoints.storage.roots import Root
from checkpoints.tools.compare import Difference, compare
from checkpoints.tools.interop import export_to, import_from
from checkpoints.tools.prune import prune

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
    "Tier",
    "TierFailure",
    "TierOutcome",
    "TieredEngine",
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
