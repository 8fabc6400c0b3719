"""``elastic.join(preflight=True)``: keeps an unfit node from joining.

The checks run in a separate process (:mod:`elastic.doctor.before_joining`): workers import neither
the doctor nor grpc, and a hung driver or file system must not hang this process.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from elastic.child_interpreters import module_command
from elastic.clock import SYSTEM_CLOCK
from elastic.errors import NodeUnfit
from elastic.telemetry.log import get_logger
from elastic.tuning.worker_intervals import PREFLIGHT_S
from elastic.world.world import node_name

# Set by an agent that has checked the machine itself (--rdzv-conf preflight=1).
PASSED_VARIABLE = "ELASTIC_PREFLIGHT_PASSED"
_MODULE = "elastic.doctor.before_joining"


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
    found = _examine(folder, machine_is_checked=is_checked)
    for finding in found:
        if finding["status"] == "warning":
            get_logger().warning("preflight: %s", _sentence(finding))
    bad = [finding for finding in found if finding["status"] == "failed"]
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
