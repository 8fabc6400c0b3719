"""The files with which workers report the exception that ended them to torchrun's agent."""

from __future__ import annotations

import json
import os

from torch.distributed.elastic.multiprocessing import errors

from elastic.rendezvous import torch_private
from elastic.telemetry.log import get_logger


def tolerate_unreadable_error_files() -> None:
    """Make torch's agents tolerate an error file that is not JSON, here and from now on.

    A worker writes it in place: if it is killed while writing, or the disk is full, the file is
    empty or truncated.
    """
    # (torch 2.13, elastic/multiprocessing/errors: ProcessFailure.__post_init__ parses and raises.)
    torch_private.replace_process_failure(_process_failure)


def _process_failure(
    local_rank: int, pid: int, exitcode: int, error_file: str
) -> errors.ProcessFailure:
    if os.path.isfile(error_file) and (problem := _why_unreadable(error_file)) is not None:
        get_logger().warning(
            "the error file of worker %d (pid %d) cannot be read (%r): only its exit code %d is "
            "known; %s",
            local_rank,
            pid,
            problem,
            exitcode,
            error_file,
        )
        error_file = ""  # as for a worker that has written none
    return errors.ProcessFailure(local_rank, pid, exitcode, error_file)


def _why_unreadable(error_file: str) -> Exception | None:
    """What torch's ``ProcessFailure`` would raise."""
    try:
        with open(error_file, encoding="utf-8") as file:
            written = json.load(file)
        message = written["message"]
        int(
            written.get("timestamp", 0)
            if isinstance(message, str)
            else message["extraInfo"]["timestamp"]
        )
    except Exception as problem:  # noqa: BLE001  a worker may have written anything
        return problem
    return None
