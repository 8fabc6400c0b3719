"""Runs functions of :mod:`elastic.doctor.machine` in child processes with deadlines.

A hung disk, an unreachable name server, a hung driver: none of them can be
interrupted from within a process. So each probe is a process, which is killed without waiting: one
that is blocked in the kernel ends later.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastic.child_interpreters import code_command
from elastic.clock import SYSTEM_CLOCK
from elastic.doctor import machine
from elastic.tuning.doctor_intervals import DOCTOR_KILLED_S, DOCTOR_MIN_WAIT_S

_FACTS: Mapping[str, type[Any]] = {
    "shm": machine.ShmFacts,
    "limits": machine.LimitFacts,
    "network": machine.NetworkFacts,
    "folder": machine.FolderFacts,
    "names": machine.NameFacts,
    "gpu": machine.GpuFacts,
    "versions": machine.VersionFacts,
}
_CODE = "from elastic.doctor.probes import child; child()"


@dataclass(frozen=True)
class Unanswered:
    """A probe that was killed at its deadline, or that failed."""

    reason: str


class Probe:
    """One function in a child process; :meth:`result` waits for it."""

    def __init__(self, name: str, arguments: Sequence[object], *, deadline_s: float) -> None:
        self._name = name
        self._deadline_s = deadline_s
        self._ends_s = SYSTEM_CLOCK.monotonic() + deadline_s
        self._process = subprocess.Popen(
            code_command(_CODE, [str(os.getpid()), name, json.dumps(arguments)]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # its own children are killed with it
        )

    def result(self) -> Any:
        """The facts, or :class:`Unanswered`."""
        left_s = max(self._ends_s - SYSTEM_CLOCK.monotonic(), DOCTOR_MIN_WAIT_S)
        try:
            out, err = self._process.communicate(timeout=left_s)
        except subprocess.TimeoutExpired:
            self._kill()
            return Unanswered(f"no answer within {self._deadline_s:g} s")
        if self._process.returncode != 0:
            lines = err.decode(errors="replace").strip().splitlines()
            why = lines[-1][:300] if lines else f"exit code {self._process.returncode}"
            return Unanswered(f"the check ended without a result: {why}")
        return _facts(_FACTS[self._name], json.loads(out))

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(DOCTOR_KILLED_S)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()


def child() -> None:
    """The main function of the child: ``PARENT NAME ARGUMENTS``; facts as JSON on stdout."""
    parent, name, arguments = sys.argv[1:]
    machine.die_with_parent(int(parent))
    facts = getattr(machine, name)(*json.loads(arguments))
    sys.stdout.write(json.dumps(asdict(facts)))


def _facts(kind: type[Any], values: dict[str, Any]) -> Any:
    """Convert JSON's lists to the tuples of the dataclasses."""
    hints = typing.get_type_hints(kind)
    return kind(
        **{k: tuple(v) if typing.get_origin(hints[k]) is tuple else v for k, v in values.items()}
    )
