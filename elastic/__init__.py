"""Elastic, fault-tolerant training: see README.md.

``import elastic`` is fast: torch is imported when a name that needs it is first used. Start reading
at :mod:`elastic.training.run`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.errors import CheckpointRequired, ConfigError, ElasticError, NoWorld, TrainingError
    from elastic.training.checkpointing.options import Checkpoints
    from elastic.training.data.loader import ElasticLoader
    from elastic.training.data.sampler import ElasticSampler
    from elastic.training.observers.tensorboard import TensorBoard
    from elastic.training.observers.writer import MetricsWriter
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
    "MetricsWriter",
    "NoWorld",
    "Run",
    "Step",
    "TensorBoard",
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
    "MetricsWriter": "elastic.training.observers.writer",
    "NoWorld": "elastic.errors",
    "Run": "elastic.training.run",
    "Step": "elastic.training.step",
    "TensorBoard": "elastic.training.observers.tensorboard",
    "TrainingError": "elastic.errors",
    "World": "elastic.world.world",
    "join": "elastic.training.run",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'elastic' has no attribute {name!r}")
    _refuse_another_checkpoints()
    value = globals()[name] = getattr(import_module(home), name)
    return value


def _refuse_another_checkpoints() -> None:
    """Raise ConfigError if a script's own ``checkpoints.py`` hides the package of that name."""
    spec = find_spec("checkpoints")
    found = spec.origin if spec is not None else None
    own = Path(__file__).parent.with_name("checkpoints") / "__init__.py"
    if found is not None and own.exists() and not own.samefile(found):
        from elastic.errors import ConfigError

        raise ConfigError(
            f"{found} hides the package checkpoints, which is a part of torch-elastic-harness "
            f"({own.parent})",
            hint="rename the script's module",
        )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
