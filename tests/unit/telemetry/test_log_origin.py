"""The node that a log line names, in a process that may launch several."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from elastic.telemetry.events import Waiting, WorldEntered
from elastic.telemetry.journal import Journal
from elastic.telemetry.log import LOGGER_NAME, LogOrigin, UtcFormatter, add_origin, remove_origin


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(UtcFormatter("%(message)s%(where)s"))
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.format(record))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    for name in ("ELASTIC_NODE_NAME", "ELASTIC_WORLD", "RANK"):
        monkeypatch.delenv(name, raising=False)
    logger, handler = logging.getLogger(LOGGER_NAME), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.seen
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_lines_name_the_node_of_this_process_and_its_generation(lines: list[str]) -> None:
    origin = LogOrigin("a")
    journal = Journal(folder=None, identity={}, origin=origin)
    add_origin(origin)
    logging.getLogger(LOGGER_NAME).info("before")
    journal.emit(WorldEntered(generation=3, first_rank=0, size=1, waited_s=0.0))
    logging.getLogger(LOGGER_NAME).info("after")
    remove_origin(origin)
    logging.getLogger(LOGGER_NAME).info("later")
    assert lines[0] == "before [a]"
    assert lines[1].endswith(" [a g3]")
    assert lines[2:] == ["after [a g3]", "later"]


def test_with_two_nodes_only_attributable_lines_name_a_node(lines: list[str]) -> None:
    one, other = LogOrigin("a"), LogOrigin("b")
    add_origin(one)
    add_origin(other)
    Journal(folder=None, identity={}, origin=other).emit(Waiting(reason="x"))
    logging.getLogger(LOGGER_NAME).info("whose")
    remove_origin(one)
    remove_origin(other)
    assert lines == ["waiting reason='x' [b]", "whose"]
