"""Logs a job's guarantees once, at its start, if they are weaker than in-process recovery.

A script's recovery mode depends on its calls, and is otherwise not visible: a script that does not
use this project trains under this launcher as under any other, until the world changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.telemetry.log import get_logger
from elastic.tuning.agent_intervals import JOIN_EXPECTED_S

RESTART_MODE = (
    "mode=restart: when the world changes, all workers are restarted. A script with "
    "elastic.join() resumes from its last checkpoint, with the same global batch and order of "
    "data; any other script must load its own checkpoint. Without elastic.ElasticSampler its "
    "global batch is the batch per rank times the number of ranks, which changes with the world"
)
UNMODIFIED = (
    "no worker has called elastic.join() within {after_s:g} s of its start. If none does: when the "
    "world changes, all workers are restarted. The script must load its own newest checkpoint, or "
    "it starts from scratch; later steps are repeated. Its global batch is the batch per rank "
    "times the number of ranks, which changes with the world, unless elastic.ElasticSampler or "
    "elastic.join() with run.loader keeps it the same"
)


_TORCHS_LOGGER = "torch.distributed.elastic.multiprocessing.api"
# torch 2.11 to 2.15, PContext._close: one warning for each worker in each recovery by a restart.
_ENDED_WORKER = "Sending process %s closing signal %s"
# PContext.start, for each name in an empty list of signals: this package handles all of them.
_NO_SIGNAL = ("Failed to register signal handler for %s", ("",))


def drop_signal_warnings() -> None:
    """Drop torch's warnings for each ended worker, whose reason the leader logs, and for signals
    that it does not handle. Idempotent."""
    logger = logging.getLogger(_TORCHS_LOGGER)
    if _is_worth_reading not in logger.filters:
        logger.addFilter(_is_worth_reading)


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return record.msg != _ENDED_WORKER and (record.msg, record.args) != _NO_SIGNAL


class RestartNotice:
    """One per agent. ``say`` logs the message."""

    def __init__(
        self,
        mode: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self._mode = mode
        self._clock = clock
        self._say = say or get_logger().warning
        self._due_s: float | None = None
        self._is_reported = False

    def workers_start(self, *, is_first_node: bool) -> None:
        """Called when workers start; ``is_first_node``: one of them is rank 0."""
        if self._is_reported or not is_first_node:
            self._due_s = None
        elif self._mode == "restart":
            self._log(RESTART_MODE)
        elif self._due_s is None:
            self._due_s = self._clock.monotonic() + JOIN_EXPECTED_S

    def look(self, *, have_joined: bool) -> None:
        """Called periodically while they run. ``have_joined``: one has called elastic.join()."""
        if have_joined:
            self._due_s = None
        elif self._due_s is not None and self._clock.monotonic() >= self._due_s:
            self._log(UNMODIFIED.format(after_s=JOIN_EXPECTED_S))

    def _log(self, sentence: str) -> None:
        self._is_reported, self._due_s = True, None
        self._say(sentence)
