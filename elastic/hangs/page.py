"""The page that a worker keeps and its agent reads: one page of shared memory, no messages.

The agent reads it when the worker is stopped, when it hangs in C code with the interpreter lock
held, and when its link thread gets no time. A step costs a few microseconds of packing numbers.

The page is a memfd of the worker's, so that it lies in memory (a mapped file on a disk that hangs
would hold the training thread up) and goes away with the process. The agent opens it through
``/proc/PID/fd``. A write is not atomic: it begins and ends with the same count, and a reader that
finds two different ones reads again.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass

from elastic.hangs.facts import Flag, Phase

SIZE = 4096
NAME = "elastic-progress"
# count, generation, step, phase, outer phase, rank, operation, collective, steps in the world,
# last checkpoint, seconds of a collective, when the phase began (CLOCK_MONOTONIC, ns), count.
_HEAD = struct.Struct("<QqqiiiiqqqdqQ")
# Kept apart: a flag is not always set by the thread that trains.
_FLAGS = struct.Struct("<i")
_FLAGS_AT = 128
_DURATIONS = struct.Struct(f"<{2 * len(Phase)}d")
_DURATIONS_AT = 256
_READS = 5
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The content of a page."""

    count: int  # grows with every sign of life
    generation: int
    step: int
    phase: Phase
    outer: Phase
    rank: int
    operation: int
    collective: int
    steps_in_world: int
    checkpoint_step: int
    collective_s: float
    since_ns: int
    flags: Flag
    longest_s: tuple[float, ...]  # by phase
    typical_s: tuple[float, ...]


class Page:
    """The worker's end."""

    def __init__(self) -> None:
        self.fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, SIZE)
        # A page that shrinks would end the agent that reads it (SIGBUS).
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._memory = mmap.mmap(self.fd, SIZE)
        self._count = 0

    def write(
        self,
        generation: int,
        step: int,
        phase: int,
        outer: int,
        rank: int,
        operation: int,
        collective: int,
        steps_in_world: int,
        checkpoint_step: int,
        collective_s: float,
        since_ns: int,
    ) -> None:
        """Say where the main thread is: a sign of life."""
        self._count = count = self._count + 1
        _HEAD.pack_into(
            self._memory,
            0,
            count,
            generation,
            step,
            phase,
            outer,
            rank,
            operation,
            collective,
            steps_in_world,
            checkpoint_step,
            collective_s,
            since_ns,
            count,
        )

    def write_flags(self, flags: int) -> None:
        """No sign of life: an endless loop collects garbage, too."""
        _FLAGS.pack_into(self._memory, _FLAGS_AT, flags)

    def write_durations(self, longest_s: list[float], typical_s: list[float]) -> None:
        """How long the phases took lately."""
        _DURATIONS.pack_into(self._memory, _DURATIONS_AT, *longest_s, *typical_s)

    def close(self) -> None:
        """Let go of it."""
        self._memory.close()
        os.close(self.fd)


class PageReader:
    """The agent's end of the page of process ``pid``, which has it open as ``fd``."""

    def __init__(self, pid: int, fd: int) -> None:
        """Raises OSError if that is no page of ours, or not to be opened."""
        path = f"/proc/{pid}/fd/{fd}"
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            raise FileNotFoundError(f"{path} is no page of progress")
        mine = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            is_sealed = fcntl.fcntl(mine, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if os.fstat(mine).st_size != SIZE or not is_sealed:
                raise FileNotFoundError(f"{path} is not sealed at {SIZE} bytes")
            self._memory = mmap.mmap(mine, SIZE, access=mmap.ACCESS_READ)
        finally:
            os.close(mine)

    def read(self) -> Reading | None:
        """The content; None if it is inconsistent: a write was interrupted."""
        for _ in range(_READS):
            head = _HEAD.unpack_from(self._memory, 0)
            if head[0] == head[-1]:
                with contextlib.suppress(ValueError):  # not a phase
                    return self._reading(head)
        return None

    def _reading(self, head: tuple[int, ...]) -> Reading:
        durations_s = _DURATIONS.unpack_from(self._memory, _DURATIONS_AT)
        (flags,) = _FLAGS.unpack_from(self._memory, _FLAGS_AT)
        return Reading(
            count=head[0],
            generation=head[1],
            step=head[2],
            phase=Phase(head[3]),
            outer=Phase(head[4]),
            rank=head[5],
            operation=head[6],
            collective=head[7],
            steps_in_world=head[8],
            checkpoint_step=head[9],
            collective_s=float(head[10]),
            since_ns=head[11],
            flags=Flag(flags & sum(Flag)),
            longest_s=durations_s[: len(Phase)],
            typical_s=durations_s[len(Phase) :],
        )

    def close(self) -> None:
        """Let go of it."""
        self._memory.close()
