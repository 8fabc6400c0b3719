"""Elastic, fault-tolerant training: see README.md.

``import elastic`` costs nothing: torch is imported when a name that needs it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.errors import CheckpointRequired, ConfigError, ElasticError, NoWorld, TrainingError
    from elastic.training.checkpointing.options import Checkpoints
    from elastic.training.data.loader import ElasticLoader
    from elastic.training.data.sampler import ElasticSampler
    from elastic.training.run import Run, join
    from elastic.training.step import Step
    from elastic.world.world import World

__all__ = [
    "CheckpointRequired",
    "Checkpoints",
    "ConfigError",
    "ElasticError",
    "ElasticLoader",
    "ElasticSampler",
    "NoWorld",
    "Run",
    "Step",
    "TrainingError",
    "World",
    "join",
]

_HOMES = {
    "CheckpointRequired": "elastic.errors",
    "Checkpoints": "elastic.training.checkpointing.options",
    "ConfigError": "elastic.errors",
    "ElasticError": "elastic.errors",
    "ElasticLoader": "elastic.training.data.loader",
    "ElasticSampler": "elastic.training.data.sampler",
    "NoWorld": "elastic.errors",
    "Run": "elastic.training.run",
    "Step": "elastic.training.step",
    "TrainingError": "elastic.errors",
    "World": "elastic.world.world",
    "join": "elastic.training.run",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'elastic' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
