"""What a worker provides for hang detection: its progress page, and its stacks."""

from __future__ import annotations

import functools

from elastic import torch_private
from elastic.hangs import stacks
from elastic.hangs.phases import phases
from elastic.link.protocol import ProgressPage
from elastic.telemetry.log import get_logger


def offer_page() -> ProgressPage | None:
    """Keep a progress page from now on, and return the message with its descriptors for the agent.

    None if the page or the stacks could not be created; then the worker's hangs go undetected.
    """
    try:
        page_fd = phases.start()
        source = _offer_stacks()
    except OSError as error:
        get_logger().warning("hangs of this worker will not be detected: %s", error)
        return None
    _watch_batches()
    return ProgressPage(fd=page_fd, stacks_fd=source.fd, stacks_signal=source.signum)


@functools.cache  # once per process
def _offer_stacks() -> stacks.StackSource:
    return stacks.offer()


@functools.cache
def _watch_batches() -> None:
    torch_private.watch_batches(phases.enter_batch, phases.enter)
