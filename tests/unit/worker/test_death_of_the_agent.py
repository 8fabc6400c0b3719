"""A worker whose agent has died ends, wherever its output goes."""

from __future__ import annotations

import os

from elastic.worker.worlds import AGENT_DIED_EXIT_CODE, _die

SURVIVED = 99


def test_a_worker_ends_although_nobody_reads_its_errors() -> None:
    """Its standard error is a pipe to the agent, which the kernel has closed on the other side."""
    reads, writes = os.pipe()
    os.close(reads)
    pid = os.fork()
    if pid == 0:
        os.dup2(writes, 2)
        try:
            _die()
        finally:
            os._exit(SURVIVED)
    os.close(writes)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == AGENT_DIED_EXIT_CODE
