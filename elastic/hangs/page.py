"""The page that a worker keeps and its agent reads: one page of shared memory, no messages.

The agent reads it when the worker is stopped, when it hangs in C code with the interpreter lock
held, and when its link thread gets no time. A step costs a few microseconds of packing numbers.

The page is a memfd of the worker, so that it is in memory (a mapped file on a hanging disk would
block the training thread) and disappears with the process. The agent opens it through
``/proc/PID/fd``. A write is not atomic: it begins and ends with the same count, and a reader that
finds two different counts reads again.
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
# Words of 64 bits: count, phase, when it began (CLOCK_MONOTONIC, ns), nine that change less often,
# count. They are stored one by one, without a call or a loop in between, so that no other thread
# of the worker takes the interpreter lock in the middle and hangs with it. (Python 3.10 may switch
# threads there; such a page cannot be read.) Packing by struct would cost as much as the rest of a
# phase, with cold caches.
_WORDS = struct.Struct("=13q")
# Kept apart: a flag is not always set by the thread that trains.
_FLAGS = struct.Struct("<i")
_FLAGS_AT = 128
# Written once an epoch: the planned number of steps of the job; 0: unknown.
_PLANNED = struct.Struct("<q")
_PLANNED_AT = 192
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
    planned_steps: int = 0  # of the whole job; 0: unknown


class Page:
    """The worker's end of the page."""

    def __init__(self) -> None:
        self.fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, SIZE)
        # A page that shrinks would end the agent that reads it (SIGBUS).
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self._memory = mmap.mmap(self.fd, SIZE)
        self._words = memoryview(self._memory).cast("q")
        self._count = 0

    def write(self, phase: int, since_ns: int) -> None:
        """Record the position of the main thread: a sign of life."""
        words = self._words
        self._count = count = self._count + 1
        words[0] = count
        words[1] = phase
        words[2] = since_ns
        words[12] = count

    def write_place(
        self,
        phase: int,
        since_ns: int,
        generation: int,
        step: int,
        outer: int,
        rank: int,
        operation: int,
        collective: int,
        steps_in_world: int,
        checkpoint_step: int,
        collective_ns: int,
    ) -> None:
        """The same, with the words that change less often than the phase."""
        words = self._words
        self._count = count = self._count + 1
        words[0] = count
        words[1] = phase
        words[2] = since_ns
        words[3] = generation
        words[4] = step
        words[5] = outer
        words[6] = rank
        words[7] = operation
        words[8] = collective
        words[9] = steps_in_world
        words[10] = checkpoint_step
        words[11] = collective_ns
        words[12] = count

    def write_wait(
        self, phase: int, since_ns: int, outer: int, operation: int, collective: int
    ) -> None:
        """The same when a wait for other ranks begins and nothing else has changed."""
        words = self._words
        self._count = count = self._count + 1
        words[0] = count
        words[1] = phase
        words[2] = since_ns
        words[5] = outer
        words[7] = operation
        words[8] = collective
        words[12] = count

    def write_end_of_wait(self, phase: int, since_ns: int, collective_ns: int) -> None:
        """The same when that wait has ended."""
        words = self._words
        self._count = count = self._count + 1
        words[0] = count
        words[1] = phase
        words[2] = since_ns
        words[11] = collective_ns
        words[12] = count

    def write_collective(self, collective: int) -> None:
        """Record the number of collectives begun, which is no sign of life."""
        self._words[8] = collective

    def write_flags(self, flags: int) -> None:
        """Record flags, which are no sign of life: an endless loop collects garbage, too."""
        _FLAGS.pack_into(self._memory, _FLAGS_AT, flags)

    def write_planned_steps(self, steps: int) -> None:
        """Record the planned number of steps of the job; 0: unknown."""
        _PLANNED.pack_into(self._memory, _PLANNED_AT, steps)

    def write_durations(self, longest_s: list[float], typical_s: list[float]) -> None:
        """Record the recent durations of the phases."""
        _DURATIONS.pack_into(self._memory, _DURATIONS_AT, *longest_s, *typical_s)

    def close(self) -> None:
        """Release the page."""
        self._words.release()
        self._memory.close()
        os.close(self.fd)


class PageReader:
    """The agent's end of the page of process ``pid``, which has it open as ``fd``."""

    def __init__(self, pid: int, fd: int) -> None:
        """Raises OSError if the descriptor is not a progress page or cannot be opened."""
        path = f"/proc/{pid}/fd/{fd}"
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            raise FileNotFoundError(f"{path} is not a progress page")
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
            words = _WORDS.unpack_from(self._memory, 0)
            if words[0] == words[-1]:
                with contextlib.suppress(ValueError):  # not a phase
                    return self._reading(words)
        return None

    def _reading(self, words: tuple[int, ...]) -> Reading:
        count, phase, since_ns, generation, step, outer, rank, operation, *counts, _ = words
        collective, steps_in_world, checkpoint_step, collective_ns = counts
        durations_s = _DURATIONS.unpack_from(self._memory, _DURATIONS_AT)
        (flags,) = _FLAGS.unpack_from(self._memory, _FLAGS_AT)
        (planned_steps,) = _PLANNED.unpack_from(self._memory, _PLANNED_AT)
        return Reading(
            count=count,
            generation=generation,
            step=step,
            phase=Phase(phase),
            outer=Phase(outer),
            rank=rank,
            operation=operation,
            collective=collective,
            steps_in_world=steps_in_world,
            checkpoint_step=checkpoint_step,
            collective_s=collective_ns * 1e-9,
            since_ns=since_ns,
            flags=Flag(flags & sum(Flag)),
            longest_s=durations_s[: len(Phase)],
            typical_s=durations_s[len(Phase) :],
            planned_steps=planned_steps,
        )

    def close(self) -> None:
        """Release the page."""
        self._memory.close()
