"""A program of this interpreter that is run to its end, ready at once."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic.testing.forks.server import ForkedPopen, can_fork, shared_fork_server


def run_program(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    cwd: Path | None = None,
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run(command, capture_output=True, text=True)``, forked where that can be.

    Raises subprocess.TimeoutExpired after ``timeout_s``; the process is killed then.
    """
    server = shared_fork_server()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
        process: subprocess.Popen[bytes]
        if server is not None and can_fork(command, env):
            process = ForkedPopen(server.client, command, env=env, cwd=cwd, **files)
        else:
            process = subprocess.Popen(command, env=env, cwd=cwd, **files)  # type: ignore[call-overload]
        try:
            code = process.wait(timeout_s)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        for file in (output, errors):
            file.seek(0)
        said = (output.read().decode(), errors.read().decode())
    return subprocess.CompletedProcess(command, code, *said)
