"""The notice at the start of a job whose workers restart when the world changes."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch.distributed.elastic.multiprocessing.api
from kit.manual_clock import ManualClock

from elastic.launcher.scripts import (
    JOIN_EXPECTED_S,
    RestartNotice,
    drop_signal_warnings,
)


def test_torch_warnings_about_restarted_workers_are_dropped(
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
        logger.warning("Failed to register signal handler for %s", "")
        logger.warning("Unable to shutdown process %s", 1)
    finally:
        logger.filters[:] = before
    assert [record.getMessage() for record in caplog.records] == ["Unable to shutdown process 1"]


def test_the_first_node_logs_the_notice_once_for_unmodified_scripts() -> None:
    clock, logged = ManualClock(), list[str]()
    notice = RestartNotice("in-process", clock=clock, say=logged.append)
    notice.workers_start(is_first_node=True)
    notice.look(have_joined=False)
    assert not logged, "they may still import"
    clock.advance(JOIN_EXPECTED_S)
    notice.look(have_joined=False)
    (sentence,) = logged
    assert "no worker has called elastic.join()" in sentence
    assert "changes with the world, unless elastic.ElasticSampler" in sentence
    notice.workers_start(is_first_node=True)
    clock.advance(JOIN_EXPECTED_S)
    notice.look(have_joined=False)
    assert len(logged) == 1


def test_no_notice_for_scripts_that_join_or_on_other_nodes() -> None:
    for is_first_node, have_joined in ((True, True), (False, False)):
        clock, logged = ManualClock(), list[str]()
        notice = RestartNotice("in-process", clock=clock, say=logged.append)
        notice.workers_start(is_first_node=is_first_node)
        clock.advance(JOIN_EXPECTED_S)
        notice.look(have_joined=have_joined)
        assert not logged


def test_restart_mode_logs_the_notice_immediately() -> None:
    logged = list[str]()
    notice = RestartNotice("restart", clock=ManualClock(), say=logged.append)
    notice.workers_start(is_first_node=True)
    notice.workers_start(is_first_node=True)
    (sentence,) = logged
    assert sentence.startswith("mode=restart: ")
