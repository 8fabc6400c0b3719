"""What the kernel says about a worker's process and its machine: /proc and cgroup files.

Only the main thread's state counts: a worker has dozens of threads that sleep. Whatever cannot be
read (a process that has just ended, a hardened /proc) is left out: a report is better with gaps
than not at all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_AFTER_NAME = 3  # proc(5) counts the fields of stat from 1, and state is the third


@dataclass(frozen=True, kw_only=True)
class ProcessTimes:
    """One look at ``/proc/PID/stat``."""

    state: str
    cpu_s: float  # user and system, of all threads
    major_faults: int  # pages that had to be read from disk, swap included


def process_times(pid: int) -> ProcessTimes | None:
    """None: there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            # The name is in brackets, and may hold any.
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return ProcessTimes(
        state=fields[0],
        major_faults=int(fields[12 - _AFTER_NAME]),
        cpu_s=(int(fields[14 - _AFTER_NAME]) + int(fields[15 - _AFTER_NAME])) / _TICKS_PER_S,
    )


def is_stopped(pid: int) -> bool:
    """Whether it is in state T: all of its threads are stopped, and no signal handler runs."""
    times = process_times(pid)
    return times is not None and times.state == "T"


def starved_s(pid: int) -> float:
    """How long the main thread has been waiting for a core since it began (schedstat, field 2)."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as stat:
            return int(stat.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def tracer_pid(pid: int) -> int:
    """Who traces the process (a debugger, strace); 0: nobody."""
    return int(_status(pid, "TracerPid") or 0)


def wait_channel(pid: int) -> str:
    """The kernel function that the main thread sleeps in; "" where it does not, or is hidden."""
    name = _read(f"/proc/{pid}/wchan").strip()
    return "" if name == "0" else name


def data_workers(pid: int) -> str:
    """The states of its child processes, one letter each: a DataLoader's workers, mostly."""
    found = (process_times(child) for child in children(pid)[:64])
    return "".join(sorted(times.state for times in found if times is not None))


def children(pid: int) -> list[int]:
    """The processes that the main thread has started and that live."""
    return [int(child) for child in _read(f"/proc/{pid}/task/{pid}/children").split()]


def describe_process(pid: int) -> dict[str, str]:
    """For the report."""
    said = {
        "state": _status(pid, "State"),
        "wait channel": wait_channel(pid),
        "memory (VmRSS)": _status(pid, "VmRSS"),
        "swapped (VmSwap)": _status(pid, "VmSwap"),
        "threads": _status(pid, "Threads"),
        "children": data_workers(pid),
        "system call": _read(f"/proc/{pid}/syscall").split(" ")[0].strip(),
    }
    return {name: value for name, value in said.items() if value}


def describe_node(folders: Sequence[str] = ()) -> dict[str, str]:
    """Pressure, memory events, retransmissions, and room in these folders: for the report."""
    said = {
        "load": _read("/proc/loadavg").strip(),
        "uptime": _read("/proc/uptime").split(" ")[0],
        "TCP": _retransmissions(),
    }
    for kind in ("cpu", "memory", "io"):
        said[f"pressure ({kind})"] = _read(f"/proc/pressure/{kind}").replace("\n", "; ").strip("; ")
    said["memory events (cgroup)"] = _memory_events()
    for folder in folders:
        try:
            usage = shutil.disk_usage(folder)
        except OSError as error:
            said[f"disk ({folder})"] = str(error)
        else:
            said[f"disk ({folder})"] = f"{usage.free >> 20} of {usage.total >> 20} MiB free"
    return {name: value for name, value in said.items() if value}


def _memory_events() -> str:
    """``oom 0; oom_kill 0`` and more, of this process's cgroup (version 2)."""
    line = next(
        (text for text in _read("/proc/self/cgroup").splitlines() if text.startswith("0::")), ""
    )
    path = line.removeprefix("0::").strip()
    events = _read(f"/sys/fs/cgroup{path}/memory.events") or _read("/sys/fs/cgroup/memory.events")
    return "; ".join(events.split("\n")).strip("; ")


def _retransmissions() -> str:
    """Of all connections since the machine started."""
    lines = [line.split() for line in _read("/proc/net/snmp").splitlines() if line[:4] == "Tcp:"]
    if len(lines) != 2:
        return ""
    values = dict(zip(*lines, strict=False))
    return f"{values.get('RetransSegs', '?')} of {values.get('OutSegs', '?')} segments sent again"


def _status(pid: int, field: str) -> str:
    lines = _read(f"/proc/{pid}/status").splitlines()
    line = next((text for text in lines if text.startswith(f"{field}:")), "")
    return " ".join(line.partition(":")[2].split())


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
