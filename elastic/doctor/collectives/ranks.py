"""This node's ranks: starts them, sends them operations, and kills them at a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from elastic.child_interpreters import module_command
from elastic.clock import SYSTEM_CLOCK
from elastic.doctor.collectives.outcomes import ENDED, RUNNING, STOPPED, RankOutcome, Result, Speed
from elastic.tuning.doctor_intervals import (
    DOCTOR_END_S,
    DOCTOR_MIN_WAIT_S,
    DOCTOR_OTHER_RANKS_S,
    DOCTOR_START_S,
)

# Variables of an outer launcher, which these ranks must not inherit.
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The assignment of ranks to nodes, and the address of each rank's node."""

    backend: str
    first_rank: int
    local: int
    addresses: tuple[str, ...]  # one for each rank
    node: str

    @property
    def size(self) -> int:
        return len(self.addresses)


@dataclass
class _Process:
    process: subprocess.Popen[str]
    log: IO[str]
    progress: RankOutcome
    build: Mapping[str, Any] | None = None
    reader: threading.Thread = field(init=False)


class Ranks:
    """The rank processes of one node. Not thread-safe; call :meth:`close`."""

    def __init__(self, layout: RankLayout) -> None:
        self._layout = layout
        self._messages: queue.SimpleQueue[tuple[int, Mapping[str, Any] | None]] = (
            queue.SimpleQueue()
        )
        self._processes = {
            layout.first_rank + local: self._start(local) for local in range(layout.local)
        }

    # -- for callers -----------------------------------------------------------------------

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(one.process.pid for one in self._processes.values())

    def wait_until_ready(self, within_s: float = DOCTOR_START_S) -> bool:
        """Wait until all ranks have imported torch; False if one failed or time ran out."""
        ends_s = SYSTEM_CLOCK.monotonic() + within_s
        while any(one.build is None for one in self._processes.values()):
            if not self._take(ends_s) or self._has_failed():
                return False
        return True

    @property
    def builds(self) -> list[Mapping[str, Any]]:
        """Build facts of each rank's torch, without ranks that have not started."""
        return [one.build for one in self._processes.values() if one.build is not None]

    def run(self, group: str, methods: Sequence[str], silence_s: float) -> tuple[RankOutcome, ...]:
        """Run a group of operations; returns once all are done, one has failed, or none
        has reported anything for ``silence_s``. Unfinished ranks cannot be used again."""
        # gloo's own timeout is longer: ours names the rank.
        command = {"group": group, "methods": list(methods), "timeout_s": 2 * silence_s}
        for one in self._processes.values():
            one.progress = _fresh(one.progress)
            with contextlib.suppress(OSError):  # it has ended, which its reader detects
                assert one.process.stdin is not None
                one.process.stdin.write(json.dumps(command) + "\n")
                one.process.stdin.flush()
        while not all(one.progress.is_done for one in self._processes.values()):
            failed_before = self._has_failed()
            patience_s = DOCTOR_OTHER_RANKS_S if failed_before else silence_s
            if not self._take(SYSTEM_CLOCK.monotonic() + patience_s):
                break
        return self.progress()

    def progress(self) -> tuple[RankOutcome, ...]:
        """The current progress of all ranks."""
        return tuple(_with_state(one.progress) for one in self._processes.values())

    def close(self) -> None:
        """Kill all ranks, without waiting for a process that is blocked in the kernel."""
        for one in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
        for one in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.process.wait(DOCTOR_END_S)
                one.reader.join()
            with contextlib.suppress(OSError):
                assert one.process.stdin is not None
                one.process.stdin.close()
            one.log.close()

    # -- parts -----------------------------------------------------------------------------

    def _start(self, local: int) -> _Process:
        layout = self._layout
        rank = layout.first_rank + local
        config = {
            "parent": os.getpid(),
            "rank": rank,
            "local_rank": local,
            "world_size": layout.size,
            "backend": layout.backend,
            "addresses": layout.addresses,
        }
        log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by close)
        process = subprocess.Popen(
            module_command("elastic.doctor.collectives.operations", [json.dumps(config)]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=_environment(),
            start_new_session=True,
        )
        progress = RankOutcome(rank=rank, node=layout.node, pid=process.pid, state=RUNNING)
        one = _Process(process, log, progress)
        one.reader = threading.Thread(
            target=self._read, args=(rank, process), name=f"elastic-doctor-rank-{rank}", daemon=True
        )
        one.reader.start()
        return one

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._messages.put((rank, json.loads(line)))
        self._messages.put((rank, None))

    def _take(self, ends_s: float) -> bool:
        """Wait for one message and note it; False if none came in time."""
        try:
            left_s = max(ends_s - SYSTEM_CLOCK.monotonic(), DOCTOR_MIN_WAIT_S)
            rank, message = self._messages.get(timeout=left_s)
        except queue.Empty:
            return False
        one = self._processes[rank]
        if message is None:
            one.progress = replace(one.progress, state=ENDED, how_ended=_how_ended(one))
        elif message["event"] == "ready":
            one.build = message
        else:
            one.progress = noted(one.progress, message)
        return True

    def _has_failed(self) -> bool:
        return any(p.progress.error or p.progress.state == ENDED for p in self._processes.values())


def noted(progress: RankOutcome, message: Mapping[str, Any]) -> RankOutcome:
    """The progress after one message of the rank."""
    operation = message.get("operation", progress.operation)
    match message["event"]:
        case "entered":
            entered = progress.entered + 1
            return replace(progress, entered=entered, operation=operation, peer=message["peer"])
        case "done":
            result = Result(operation=operation, took_ms=message["took_ms"], wrong=message["wrong"])
            return replace(progress, results=(*progress.results, result))
        case "unsupported":
            result = Result(operation=operation, unsupported=message["text"])
            return replace(progress, results=(*progress.results, result))
        case "error":
            return replace(progress, operation=operation, error=message["text"])
        case "speed":
            speed = Speed(**{k: v for k, v in message.items() if k != "event"})
            return replace(progress, speeds=(*progress.speeds, speed))
        case "end":
            return replace(progress, is_done=True, peak_bytes=message["peak_bytes"])
    raise AssertionError(f"a rank reports {message}")


def _fresh(progress: RankOutcome) -> RankOutcome:
    return RankOutcome(
        rank=progress.rank,
        node=progress.node,
        pid=progress.pid,
        state=progress.state,
        how_ended=progress.how_ended,
    )


def _with_state(progress: RankOutcome) -> RankOutcome:
    """Add the kernel's state: a stopped rank cannot report that itself."""
    if progress.state != RUNNING:
        return progress
    try:
        state = Path(f"/proc/{progress.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return progress
    return replace(progress, state=STOPPED) if state in "Tt" else progress


def _how_ended(one: _Process) -> str:
    try:
        code = one.process.wait(DOCTOR_END_S)
    except subprocess.TimeoutExpired:
        return "has closed its output"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    one.log.seek(0)
    lines = one.log.read().strip().splitlines()
    return f"ended with exit code {code}" + (f": {lines[-1][:300]}" if lines else "")


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in _LAUNCHER}
    kept.setdefault("OMP_NUM_THREADS", "1")
    return kept
