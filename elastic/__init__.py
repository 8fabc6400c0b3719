"""Elastic, fault-tolerant training: see README.md.

``import elastic`` is fast: torch is imported when a name that needs it is first used. Start reading
at :mod:`elastic.train.run`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic.errors import CheckpointRequired, ConfigError, ElasticError, NoWorld, TrainingError
    from elastic.groups.world import World
    from elastic.train.folder import Checkpoints
    from elastic.train.loader import ElasticLoader, Share
    from elastic.train.metrics import MetricsWriter, TensorBoard
    from elastic.train.run import Run, join
    from elastic.train.sampler import ElasticSampler
    from elastic.train.step import Step

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
    "Share",
    "Step",
    "TensorBoard",
    "TrainingError",
    "World",
    "join",
]

_HOMES = {
    "CheckpointRequired": "elastic.errors",
    "Checkpoints": "elastic.train.folder",
    "ConfigError": "elastic.errors",
    "ElasticError": "elastic.errors",
    "ElasticLoader": "elastic.train.loader",
    "ElasticSampler": "elastic.train.sampler",
    "MetricsWriter": "elastic.train.metrics",
    "NoWorld": "elastic.errors",
    "Run": "elastic.train.run",
    "Share": "elastic.train.loader",
    "Step": "elastic.train.step",
    "TensorBoard": "elastic.train.metrics",
    "TrainingError": "elastic.errors",
    "World": "elastic.groups.world",
    "join": "elastic.train.run",
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
    origin = spec.origin if spec is not None else None
    own = Path(__file__).parent.with_name("checkpoints") / "__init__.py"
    if origin is not None and own.exists() and not own.samefile(origin):
        from elastic.errors import ConfigError

        raise ConfigError(
            f"{origin} hides the package checkpoints, which is a part of torch-elastic-harness "
            f"({own.parent})",
            hint="rename the script's module",
        )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
