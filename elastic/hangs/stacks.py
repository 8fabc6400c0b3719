"""Stacks of a worker, taken while its interpreter lock is held elsewhere, and without ptrace.

faulthandler writes them from a signal handler, which takes no lock. Each thread writes its own
stack, which cannot change meanwhile. faulthandler can also walk all threads while they run, but
then reads frames that may have been freed: one worker in several hundred died of SIGSEGV
[measured]. Most workers are healthy and write only their main thread's stack; culprits write all.

The handler writes into a memfd of the worker, which the agent opens through ``/proc/PID/fd``. A
process that is stopped, or blocked in the kernel (state D), runs no handler: then there is no
stack.

``py-spy`` shows native frames, too. It is used if it is installed and may trace the process.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastic.errors import SYSTEM_CLOCK, Clock
from elastic.hangs.kernel import is_stopped
from elastic.hangs.page import StackGroup

# For a worker to begin to write its stacks after the signal, and to finish.
STACKS_DUMPED_S = 3.0
# How often the agent checks whether the stacks are written.
STACKS_POLL_S = 0.01
# For py-spy to read the stacks of a process.
STACKS_PY_SPY_S = 5.0

NAME = "elastic-stacks"
# tgkill(2), by number: glibc has a wrapper only since 2.30.
_TGKILL = {"x86_64": 234, "ppc64le": 250, "s390x": 241}.get(os.uname().machine, 131)
NO_SIGNAL = 0
# Real-time signals have no predefined meaning. glibc uses the first two; Java and profilers start
# at the low end.
_SIGNALS = tuple(range(signal.SIGRTMAX - 5, signal.SIGRTMAX - 13, -1))
_MAX_BYTES = 256 << 10
_CUT = "  ..."  # the end of a stack with more frames than faulthandler writes
_MAIN = '"MainThread"'
# Files that are not the script's: of Python, of installed packages, and of this project.
_PROJECT = Path(__file__).parents[2]
_LIBRARIES = (
    "/lib/python3",
    "/site-packages/",
    "/dist-packages/",
    "<frozen ",
    f"{_PROJECT}/elastic/",
    f"{_PROJECT}/checkpoints/",
)
_FRAME = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.*)')


@dataclass(frozen=True)
class StackSource:
    """How an agent requests the stacks of a worker."""

    fd: int  # in the worker
    signum: int  # NO_SIGNAL: the script uses all candidates


def offer() -> StackSource:
    """In the worker's main thread: install the handler that writes a thread's stack on a signal.

    Raises OSError if the kernel cannot allocate memory.
    """
    is_main = threading.current_thread() is threading.main_thread()
    free = (s for s in _SIGNALS if signal.getsignal(s) is signal.SIG_DFL)
    signum = next(free, NO_SIGNAL) if is_main else NO_SIGNAL
    if signum == NO_SIGNAL:
        return StackSource(-1, NO_SIGNAL)
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    faulthandler.register(signum, file=fd, all_threads=False, chain=False)
    return StackSource(fd, signum)


def take(
    pid: int, source: StackSource, clock: Clock = SYSTEM_CLOCK, *, is_culprit: bool = False
) -> str:
    """The stack of the main thread of process ``pid``; "" if there is none. It is preceded by those
    of a culprit's other threads, whose system calls are interrupted."""
    if source.signum == NO_SIGNAL or not _catches(pid, source.signum):
        return ""  # the signal would end the process, which now runs another program
    if is_stopped(pid):
        return ""  # its handler would not run, and the caller would wait for it
    path = f"/proc/{pid}/fd/{source.fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            return ""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        before = os.fstat(fd).st_size
        if is_culprit:
            _have_others_written(pid, source.signum, clock)
        others = os.pread(fd, _MAX_BYTES, before).decode(errors="replace").strip()
        before = os.fstat(fd).st_size
        blocking = _blocking(pid, source.signum)
        _signal_thread(pid, pid, source.signum)
        # A thread blocks the signal while it runs the handler.
        main = _read_when_written(
            fd, before, lambda: _blocking(pid, source.signum) <= blocking, clock
        )
        return "\n\n".join(filter(None, (others, main))) if main else ""
    except ProcessLookupError:
        return ""
    finally:
        os.close(fd)


def _read_when_written(
    fd: int, before: int, is_done: Callable[[], bool], clock: Clock = SYSTEM_CLOCK
) -> str:
    """The added text, once it is complete. A thread without a core writes nothing for a while, so a
    pause does not mean the end."""
    deadline_s = clock.monotonic() + STACKS_DUMPED_S
    has_begun = False
    while clock.monotonic() < deadline_s:
        clock.sleep(STACKS_POLL_S)
        if os.fstat(fd).st_size == before:
            continue
        if is_done():
            break
        if not has_begun:
            has_begun = True
            deadline_s += STACKS_DUMPED_S
    return os.pread(fd, _MAX_BYTES, before).decode(errors="replace")


def _have_others_written(pid: int, signum: int, clock: Clock) -> None:
    """Have all other threads write their stacks, one after the other, so that lines do not mix.
    Threads that run no Python code write nothing."""
    deadline_s = clock.monotonic() + STACKS_DUMPED_S
    for tid in _threads_of(pid):
        if tid == pid or _has_signal(pid, tid, "SigBlk", signum):
            continue
        with suppress(ProcessLookupError):
            _signal_thread(pid, tid, signum)
        while _has_signal(pid, tid, "SigPnd", signum) or _has_signal(pid, tid, "SigBlk", signum):
            if clock.monotonic() > deadline_s:
                return
            clock.sleep(STACKS_POLL_S)


def _signal_thread(pid: int, tid: int, signum: int) -> None:
    """Raises ProcessLookupError if the thread has ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(_TGKILL), *map(ctypes.c_long, (pid, tid, signum))) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _blocking(pid: int, signum: int) -> set[int]:
    """The threads of the process that block this signal (proc(5), SigBlk)."""
    return {tid for tid in _threads_of(pid) if _has_signal(pid, tid, "SigBlk", signum)}


def _threads_of(pid: int) -> list[int]:
    try:
        return [int(tid) for tid in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler for this signal (proc(5), SigCgt)."""
    return _has_signal(pid, pid, "SigCgt", signum)


def _has_signal(pid: int, tid: int, mask: str, signum: int) -> bool:
    """Whether a thread has this signal in one of its masks; False if the thread has ended."""
    try:
        with open(f"/proc/{pid}/task/{tid}/status", encoding="ascii", errors="replace") as status:
            bits = next((line.split()[1] for line in status if line.startswith(mask)), "0")
    except OSError:
        return False
    return bool(int(bits, 16) >> (signum - 1) & 1)


def take_native(pid: int) -> str:
    """The stacks from ``py-spy dump --native``, if it is installed and may trace the process; else
    "". The main thread comes last, as in :func:`take`."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--native", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=STACKS_PY_SPY_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return _main_last(done.stdout) if done.returncode == 0 else ""


def _main_last(stacks: str) -> str:
    """Move the main thread to the end. py-spy begins each thread with a line with its name."""
    threads = _threads(stacks)
    return "\n\n".join(sorted(threads, key=lambda text: _MAIN in text.partition("\n")[0]))


def main_thread(stacks: str) -> tuple[str, ...]:
    """The frames of the main thread, innermost first, as ``file:line name``.

    >>> main_thread('Thread 0x7f (most recent call first):\\n  File "a.py", line 3 in wait\\n\\n'
    ...     'Current thread 0x8f (most recent call first):\\n  File "t.py", line 9 in <module>')
    ('t.py:9 <module>',)
    """
    frames = [_FRAME.search(line) for line in _threads(stacks)[-1].splitlines()]
    return tuple(f"{f['file']}:{f['line']} {f['name']}" for f in frames if f is not None)


def script_frame(stacks: str) -> tuple[str, str]:
    """The innermost frame of the main thread in the script's own code, with its line and without;
    empty if there is none.

    >>> script_frame('Thread 0x7f (most recent call first):\\n  File "/usr/lib/python3.11/x.py", '
    ...     'line 3 in wait\\n  File "/job/train.py", line 41 in load')
    ('load (/job/train.py:41)', 'load (train.py)')
    """
    for frame in filter(None, map(_FRAME.search, _threads(stacks)[-1].splitlines())):
        if not _is_library(frame["file"]):
            file, line, name = frame.groups()
            return f"{name} ({file}:{line})", f"{name} ({os.path.basename(file)})"
    return "", ""


def _is_library(file: str) -> bool:
    return any(part in file for part in _LIBRARIES)


def _place(stacks: str) -> tuple[str, ...]:
    """A key that is equal for processes whose main threads do the same: in library files, neither
    lines nor the inner calls of the innermost function count."""
    frames = [_FRAME.search(line) for line in _threads(stacks)[-1].splitlines()]
    calls = [frame.groups() for frame in frames if frame is not None]
    if not calls:
        return tuple(line.strip() for line in _threads(stacks)[-1].splitlines()[1:])
    while len(calls) > 1 and calls[0][0] == calls[1][0] and _is_library(calls[0][0]):
        del calls[0]
    place = tuple(
        f"{file} {name}" if _is_library(file) else f"{file}:{line} {name}"
        for file, line, name in calls
    )
    return (*place, _CUT) if stacks.endswith(_CUT) else place


def main_first(stacks: str) -> str:
    """The same stacks with the main thread first, which matters most to readers."""
    return "\n\n".join(reversed(_threads(stacks)))


def group(by_rank: Iterable[tuple[int, str]], apart: Container[int] = ()) -> tuple[StackGroup, ...]:
    """Groups ranks by their main threads' activity, the smallest group first, since outliers
    matter. Ranks in ``apart`` come first, and share no group with others."""
    return merge((StackGroup((rank,), text) for rank, text in by_rank), apart)


def merge(groups: Iterable[StackGroup], apart: Container[int] = ()) -> tuple[StackGroup, ...]:
    """Merge the groups of several nodes. If a rank is in two groups, the first counts."""
    first: list[StackGroup] = []
    rest: list[StackGroup] = []
    seen: set[int] = set()
    for one in groups:
        ranks = [rank for rank in one.ranks if rank not in seen]
        seen.update(ranks)
        first.append(StackGroup(tuple(r for r in ranks if r in apart), one.text))
        rest.append(StackGroup(tuple(r for r in ranks if r not in apart), one.text))
    return (*_merged(first), *_merged(rest))


def _merged(groups: Iterable[StackGroup]) -> tuple[StackGroup, ...]:
    alike: dict[tuple[str, ...], list[StackGroup]] = {}
    for one in groups:
        if one.ranks:
            alike.setdefault(_place(one.text), []).append(one)
    merged = []
    for place, same in alike.items():
        if place[-1:] == (_CUT,) and (whole := _extension(place[:-1], alike)) is not None:
            alike[whole] += same
    for place, same in alike.items():
        if place[-1:] != (_CUT,) or _extension(place[:-1], alike) is None:
            ranks = tuple(sorted(rank for one in same for rank in one.ranks))
            merged.append(StackGroup(ranks, same[0].text))
    return tuple(sorted(merged, key=lambda one: (len(one.ranks), one.ranks)))


def _extension(
    frames: tuple[str, ...], places: Iterable[tuple[str, ...]]
) -> tuple[str, ...] | None:
    """The place of a complete stack that begins with these innermost frames."""
    whole = (place for place in places if place[-1:] != (_CUT,))
    return next((place for place in whole if place[: len(frames)] == frames), None)


def within(groups: Iterable[StackGroup], most: int) -> tuple[StackGroup, ...]:
    """The same groups with at most ``most`` characters of text, divided evenly; groups that need
    less leave the rest to others. Every group keeps its ranks, and as many innermost frames of the
    main thread as fit."""
    groups = tuple(groups)
    room, cut = most, dict[int, str]()
    by_length = sorted(range(len(groups)), key=lambda index: len(groups[index].text))
    for done, index in enumerate(by_length):
        text = shortened(groups[index].text, room // (len(groups) - done))
        cut[index] = text
        room -= len(text)
    return tuple(StackGroup(one.ranks, cut[index]) for index, one in enumerate(groups))


def shortened(stacks: str, most: int) -> str:
    r"""At most ``most`` characters: other threads are omitted first, then outer frames.

    >>> shortened("Thread 1:\n  a\n\nCurrent thread 2:\n  inner\n  outer", 40)
    'Current thread 2:\n  inner\n  outer'
    >>> shortened("Current thread 2:\n  inner\n  outer", 32)
    'Current thread 2:\n  inner\n  ...'
    """
    if len(stacks) <= most:
        return stacks
    threads = _threads(stacks)
    kept = threads[-1]
    if len(kept) > most:
        whole_lines = kept[: max(0, most - len(_CUT) - 1)].rpartition("\n")[0]
        return f"{whole_lines}\n{_CUT}".lstrip("\n")
    for thread in reversed(threads[:-1]):
        if len(thread) + 2 + len(kept) > most:
            break
        kept = f"{thread}\n\n{kept}"
    return kept


def _threads(stacks: str) -> list[str]:
    return re.split(r"\n+(?=(?:Current thread|Thread|Stack) )", stacks.strip())
