"""The first worker of a node, and the checks that it makes for all of them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic.child_interpreters import module_command
from elastic.errors import SYSTEM_CLOCK, NodeUnfit
from elastic.groups.world import node_name
from elastic.telemetry.log import get_logger
from elastic.wire import base
from elastic.wire.messages import WORLD_VARIABLE

# For join(preflight=True): three checks, and a start of Python, on a busy machine.
PREFLIGHT_S = 45.0

# ----------------------------------------------------------------------------
# Run an operation in one worker of a node first, such as a download or filling a cache.
#
# A file lock instead of a barrier: it needs no world, the next worker tries after a crash or an
# exception of the first one, and no worker can block the others.


@contextmanager
def node_first(turn: int, env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Run the body on one worker of this node first and, once it has succeeded, on the others
    concurrently.

    ``turn`` numbers the uses within a script, equally on all workers. An exception propagates in
    the worker that raised it, and the next worker then runs first.
    """
    path = _lock_path(env)
    token = _token(turn, env)
    descriptor = base.open_lock(path)  # other users can predict its name
    try:
        while not _may_follow(descriptor, token):
            if _try_first(descriptor):
                if _is_done(descriptor, token):
                    continue
                yield
                _mark_done(descriptor, token)
                return
        yield
    finally:
        os.close(descriptor)  # releases the lock, too


def _may_follow(descriptor: int, token: bytes) -> bool:
    """Wait while a worker runs first. Returns whether one has succeeded."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return _is_done(descriptor, token)


def _try_first(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_done(descriptor: int, token: bytes) -> bool:
    size = os.fstat(descriptor).st_size
    return token in os.pread(descriptor, size, 0).splitlines()


def _mark_done(descriptor: int, token: bytes) -> None:
    os.lseek(descriptor, 0, os.SEEK_END)
    os.write(descriptor, token + b"\n")


def _lock_path(env: Mapping[str, str]) -> Path:
    job = f"{env.get('TORCHELASTIC_RUN_ID', os.getpid())}-{os.getuid()}"
    return Path(tempfile.gettempdir()) / f"elastic-{hashlib.sha256(job.encode()).hexdigest()[:16]}"


def _token(turn: int, env: Mapping[str, str]) -> bytes:
    """Identifies this use among all of this job on this machine, which agents may share."""
    agent = env.get("ELASTIC_NODE_ID", env.get("GROUP_RANK", ""))
    attempt = env.get(WORLD_VARIABLE, env.get("TORCHELASTIC_RESTART_COUNT", ""))
    return f"{agent} {attempt} {env.get('MASTER_PORT', '')} {turn}".encode()


# ----------------------------------------------------------------------------
# ``elastic.join(preflight=True)``: keeps an unfit node from joining.
#
# The checks run in a separate process (:mod:`elastic.doctor.network`): workers import
# neither the doctor nor grpc, and a hung driver or file system must not hang this process.

# Set by an agent that has checked the machine itself (--rdzv-conf preflight=1).
PASSED_VARIABLE = "ELASTIC_PREFLIGHT_PASSED"
_MODULE = "elastic.doctor.network"


def require_fit(folder: str | None, env: Mapping[str, str] = os.environ) -> None:
    """Check this node and its checkpoint folder, on one worker of the node.

    Checks that the agent has performed are not repeated. ``folder`` is None if checkpoints are not
    files. Raises NodeUnfit, which names all failed checks and their remedies.
    """
    if env.get("LOCAL_RANK", "0") != "0":
        return  # local rank 0 checks for the node, and torchrun ends the others with it
    is_checked = env.get(PASSED_VARIABLE) == "1"
    if is_checked and folder is None:
        return
    began_s = SYSTEM_CLOCK.monotonic()
    findings = _examine(folder, machine_is_checked=is_checked)
    for finding in findings:
        if finding["status"] == "warning":
            get_logger().warning("preflight: %s", _sentence(finding))
    bad = [finding for finding in findings if finding["status"] == "failed"]
    if bad:
        raise NodeUnfit(
            f"preflight: node {node_name()} does not join the job: "
            + "; ".join(f"{finding['name']}: {finding['measured']}" for finding in bad),
            hint="; ".join(dict.fromkeys(finding["remedy"] for finding in bad))
            + " (`elastic doctor` on this node has the details)",
        )
    get_logger().info("preflight: passed in %.1f s", SYSTEM_CLOCK.monotonic() - began_s)


def _examine(folder: str | None, *, machine_is_checked: bool) -> list[dict[str, Any]]:
    command = module_command(_MODULE, [f"--parent={os.getpid()}"])
    command += [] if folder is None else [f"--folder={folder}"]
    command += ["--machine-is-checked"] if machine_is_checked else []
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PREFLIGHT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [_failed(f"no answer within {PREFLIGHT_S:g} s", "check the load of this machine")]
    if done.returncode != 0:
        lines: Sequence[str] = done.stderr.decode(errors="replace").strip().splitlines()
        why = lines[-1][:300] if lines else f"exit code {done.returncode}"
        return [_failed(f"ended without a result: {why}", "run `elastic doctor` on this node")]
    findings: list[dict[str, Any]] = json.loads(done.stdout)
    return findings


def _failed(measured: str, remedy: str) -> dict[str, Any]:
    return {"name": "preflight", "status": "failed", "measured": measured, "remedy": remedy}


def _sentence(finding: Mapping[str, Any]) -> str:
    return f"{finding['name']}: {finding['measured']}; {finding['remedy']}"
