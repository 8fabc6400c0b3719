"""What is said at the start of a job whose workers are restarted when the world changes."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch.distributed.elastic.multiprocessing.api

from elastic.rendezvous.scripts.restart_notice import (
    RestartNotice,
    drop_signal_warnings,
)
from elastic.testing.doubles.manual_clock import ManualClock
from elastic.tuning.agent_intervals import JOIN_EXPECTED_S


def test_torch_need_not_warn_of_each_worker_that_is_restarted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
    before = logger.filters.copy()
    try:
        drop_signal_warnings()
        drop_signal_warnings()
        assert len(logger.filters) == len(before) + 1
        source = inspect.getsource(torch.distributed.elastic.multiprocessing.api)
        warning = "Sending process %s closing signal %s"
        assert f'"{warning}"' in source, "torch says it in other words now"
        logger.warning(warning, 1, "SIGTERM")
        logger.warning("Unable to shutdown process %s", 1)
    finally:
        logger.filters[:] = before
    assert [record.getMessage() for record in caplog.records] == ["Unable to shutdown process 1"]


def test_unmodified_scripts_are_told_once_by_the_first_node() -> None:
    clock, said = ManualClock(), list[str]()
    notice = RestartNotice("in-process", clock=clock, say=said.append)
    notice.workers_start(is_first_node=True)
    notice.look(have_joined=False)
    assert not said, "they may still import"
    clock.advance(JOIN_EXPECTED_S)
    notice.look(have_joined=False)
    (sentence,) = said
    assert "no worker has called elastic.join()" in sentence
    assert "changes with the world, unless elastic.ElasticSampler" in sentence
    notice.workers_start(is_first_node=True)
    clock.advance(JOIN_EXPECTED_S)
    notice.look(have_joined=False)
    assert len(said) == 1


def test_scripts_that_join_and_other_nodes_say_nothing() -> None:
    for is_first_node, have_joined in ((True, True), (False, False)):
        clock, said = ManualClock(), list[str]()
        notice = RestartNotice("in-process", clock=clock, say=said.append)
        notice.workers_start(is_first_node=is_first_node)
        clock.advance(JOIN_EXPECTED_S)
        notice.look(have_joined=have_joined)
        assert not said


def test_restart_mode_is_known_at_once() -> None:
    said = list[str]()
    notice = RestartNotice("restart", clock=ManualClock(), say=said.append)
    notice.workers_start(is_first_node=True)
    notice.workers_start(is_first_node=True)
    (sentence,) = said
    assert sentence.startswith("mode=restart: ")
