"""Runs Python programs to their end in forks, without the time to start an interpreter."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.testing.forks.server import ForkedPopen, can_fork, shared_fork_server
from elastic.testing.processes import react_to_signals


def start_python(
    command: Sequence[str], *, env: Mapping[str, str], **options: Any
) -> subprocess.Popen[Any]:
    """``subprocess.Popen(command, env=env, **options)`` in a new session, forked if possible.
    Unlike a background process of a shell, it ignores no signal."""
    server = shared_fork_server()
    if server is not None and can_fork(command, env):
        return ForkedPopen(server.client, command, env=env, **options)
    return subprocess.Popen(
        command,
        env=env,
        start_new_session=True,
        preexec_fn=react_to_signals,
        **options,
    )


def run_program(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    cwd: Path | None = None,
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run(command, capture_output=True, text=True)``, forked if possible.

    Raises subprocess.TimeoutExpired after ``timeout_s``; the process is killed then.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
        process = start_python(command, env=env, cwd=cwd, **files)
        try:
            code = process.wait(timeout_s)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        for file in (output, errors):
            file.seek(0)
        outputs = (output.read().decode(), errors.read().decode())
    return subprocess.CompletedProcess(command, code, *outputs)
