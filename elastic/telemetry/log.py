"""Logs: one line per event on stderr: UTC time, level, node, message.

Standard ``logging`` under the name ``elastic``; a program that configures logging itself keeps
its own handlers (ours is added only where there is none).
"""

from __future__ import annotations

import logging
import os
import sys
import time

LOGGER_NAME = "elastic"


class UtcFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO  [node-a r3 g7 s120] message``."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        where = _where()
        record.where = f" [{where}]" if where else ""
        return super().format(record)


def _where() -> str:
    parts = (
        ("", "ELASTIC_NODE_NAME"),
        ("r", "RANK"),
        ("g", "ELASTIC_GENERATION"),
    )
    return " ".join(f"{mark}{os.environ[name]}" for mark, name in parts if os.environ.get(name))


def get_logger() -> logging.Logger:
    """The package's logger, with a handler on stderr unless the program has set up its own."""
    logger = logging.getLogger(LOGGER_NAME)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(UtcFormatter("%(asctime)s %(levelname)-7s%(where)s %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(os.environ.get("ELASTIC_LOG_LEVEL", "INFO").upper())
        logger.propagate = False
    return logger
