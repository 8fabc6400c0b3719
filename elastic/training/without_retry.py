"""What a script without ``run.retry`` gets when the world changes: said once, at its start."""

from __future__ import annotations

from elastic.telemetry.log import get_logger
from elastic.world.world import World


def say_without_retry(world: World) -> None:
    """``world`` is entered without run.retry, though the agent could recover in-process."""
    if world.rank == 0 and world.generation == 1:
        get_logger().warning(
            "training begins without run.retry(): when the world changes, all workers are started "
            "again and go on from the last checkpoint, with the same global batch and order of "
            "data (of loaders made with run.loader). With run.retry(train) they keep their "
            "processes and their state"
        )
