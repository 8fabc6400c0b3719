"""The data that a worker provides for the detection of hangs: its page, and its stacks."""

from __future__ import annotations

import functools

from elastic import torch_private
from elastic.hangs import stacks
from elastic.hangs.phases import phases
from elastic.link.protocol import ProgressPage
from elastic.telemetry.log import get_logger


def offer_page() -> ProgressPage | None:
    """Keep a page from now on; returns the message with its descriptors for the agent. None: no
    memory."""
    try:
        page_fd = phases.start()
        source = _offer_stacks()
    except OSError as error:
        get_logger().warning("hangs of this worker will not be noticed: %s", error)
        return None
    _watch_batches()
    return ProgressPage(fd=page_fd, stacks_fd=source.fd, stacks_signal=source.signum)


@functools.cache  # once per process
def _offer_stacks() -> stacks.StackSource:
    return stacks.offer()


@functools.cache
def _watch_batches() -> None:
    torch_private.watch_batches(phases.enter_batch, phases.enter)
