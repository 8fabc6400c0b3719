"""The default destination of metrics."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from elastic.training.observers.tensorboard import TensorBoard, is_installed
from elastic.training.observers.writer import MetricsWriter

OFF = "off"


def default_writers(env: Mapping[str, str] = os.environ) -> Sequence[MetricsWriter]:
    """TensorBoard, if it is installed, in ``ELASTIC_TENSORBOARD`` or ``runs/RUN_ID``.

    With ``ELASTIC_TENSORBOARD=off`` there is none. Raises ConfigError if it names a folder and
    TensorBoard is not installed.
    """
    folder = env.get("ELASTIC_TENSORBOARD")
    if folder == OFF or (not folder and not is_installed()):
        return []
    return [TensorBoard(folder or os.path.join("runs", env.get("TORCHELASTIC_RUN_ID", "local")))]
