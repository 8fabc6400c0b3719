"""The kernel's information about a worker's process and its machine: /proc and cgroup files.

Only the main thread's state matters: a worker has dozens of sleeping threads. Data that cannot be
read (a process that has just ended, a hardened /proc) is omitted: an incomplete report is better
than none.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elastic.errors import SYSTEM_CLOCK

# The report contains lines of the kernel's log up to this age: older ones are unrelated to the
# hang.
KERNEL_LOG_S = 600.0
# A thread that sleeps most of the time is looked at again after this, then after twice as long,
# until it is seen asleep, or 0.13 s have passed.
WAIT_CHANNEL_LOOK_S = 0.002

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_AFTER_NAME = 3  # proc(5) counts the fields of stat from 1, and state is the third
# Types of file systems whose server, or daemon, may stop answering.
_REMOTE = re.compile(r"nfs|cifs|smb|lustre|ceph|gluster|gpfs|beegfs|weka|fuse|9p|virtiofs|afs")
_FUSE = re.compile(r"fuse(blk)?(\.|$)")  # and not fusectl, which is the kernel's
# System calls whose first argument is a descriptor: read and write variants, close, fstat, lseek,
# flock, fsync, fdatasync, ftruncate, fallocate, getdents64, openat, newfstatat, statx.
_CALLS_ON_FILES = {
    "x86_64": {0, 1, 3, 5, 8, 17, 18, 19, 20, 73, 74, 75, 77, 217, 257, 262, 285, 295, 296, 332},
    "aarch64": {32, 46, 47, 56, 57, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70, 79, 80, 82, 83, 291},
}.get(platform.machine(), set())
_CGROUPS = "/sys/fs/cgroup"
# Kernel log lines that may explain a hang: GPUs, disks, file systems, links, memory.
_RELEVANT = re.compile(
    r"\bxid\b|i/o error|not responding|remount.*read-only|out of memory|oom-kill"
    r"|blocked for more than|hung task|soft lockup|machine check|link (is )?down"
    r"|lost carrier|mlx\d.*(error|fatal)"
    r"|\[hardware error\]|memory corruption|fallen off the bus|ext4-fs error|xfs.*(corrupt|shut)"
    r"|critical (medium|target) error|\bedac\b.* ue ",
    re.IGNORECASE,
)
_LOG_LINES = 5
_MAX_CHILDREN = 64  # child processes that are inspected
_MAX_FILES = 256  # open files that are inspected
_ESCAPED = re.compile(r"\\([0-7]{3})")  # proc(5), mountinfo: a space is \040


@dataclass(frozen=True, kw_only=True)
class ProcessTimes:
    """One reading of ``/proc/PID/stat``."""

    state: str
    cpu_s: float  # user and system, of all threads
    major_faults: int  # pages that had to be read from disk, swap included
    threads: int


def process_times(pid: int) -> ProcessTimes | None:
    """Read the times of a process; None if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            # The name is in brackets, and may contain brackets.
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return ProcessTimes(
        state=fields[0],
        major_faults=int(fields[12 - _AFTER_NAME]),
        cpu_s=(int(fields[14 - _AFTER_NAME]) + int(fields[15 - _AFTER_NAME])) / _TICKS_PER_S,
        threads=int(fields[20 - _AFTER_NAME]),
    )


def is_stopped(pid: int) -> bool:
    """Whether it is in state T: all of its threads are stopped, and no signal handler runs."""
    times = process_times(pid)
    return times is not None and times.state == "T"


def is_doomed(pid: int, times: ProcessTimes) -> bool:
    """Whether it has got SIGKILL and cannot end, because one of its threads is blocked in the
    kernel. The main thread is a zombie if it is another one."""
    if times.state in "ZX":
        return times.threads > 1
    if times.state != "D":
        return False
    pending = int(_status(pid, "SigPnd") or "0", 16) | int(_status(pid, "ShdPnd") or "0", 16)
    return bool(pending & 1 << signal.SIGKILL - 1)


def starved_s(pid: int) -> float:
    """How long the main thread has been waiting for a core since it began (schedstat, field 2)."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as stat:
            return int(stat.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def data_cpu_s(pid: int) -> float:
    """CPU time of those that produce a batch: the main thread, without the background threads of
    its process, and the child processes that live now."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as stat:
            main_s = int(stat.read().split()[0]) * 1e-9
    except (OSError, IndexError, ValueError):
        main_s = 0.0
    workers = map(process_times, children(pid)[:_MAX_CHILDREN])
    return main_s + sum(times.cpu_s for times in workers if times is not None)


def tracer_pid(pid: int) -> int:
    """The process that traces ``pid`` (a debugger, strace); 0: none."""
    return int(_status(pid, "TracerPid") or 0)


def wait_channel(pid: int) -> str:
    """The kernel function in which the main thread sleeps; "" if it does not, or it is hidden."""
    name = _read(f"/proc/{pid}/wchan").strip()
    return "" if name == "0" else name


def wait_channel_of_sleeper(pid: int, looks: int = 6) -> str:
    """The same for a thread that was just seen asleep: one that waits for the interpreter lock
    wakes up every 5 ms, and on a busy machine it is runnable for long before it has a core."""
    for look in range(looks):
        if name := wait_channel(pid):
            return name
        SYSTEM_CLOCK.sleep(WAIT_CHANNEL_LOOK_S * 2**look)
    return ""


def data_workers(pid: int) -> str:
    """The states of its child processes, one letter each: a DataLoader's workers, mostly."""
    workers = (process_times(child) for child in children(pid)[:_MAX_CHILDREN])
    return "".join(sorted(times.state for times in workers if times is not None))


def data_worker_waits(pid: int) -> str:
    """Where its child processes sleep, the rarest first: one of many may be stuck."""
    channels = Counter(filter(None, map(wait_channel, children(pid)[:_MAX_CHILDREN])))
    rarest_first = sorted(channels.items(), key=lambda of: (of[1], of[0]))
    return ", ".join(f"{count} in {channel}" for channel, count in rarest_first)


def children(pid: int) -> list[int]:
    """The processes that the main thread has started and that live."""
    return [int(child) for child in _read(f"/proc/{pid}/task/{pid}/children").split()]


class Mount(NamedTuple):
    """Where a file system is mounted, and its type."""

    path: str
    type: str

    def __str__(self) -> str:
        return f"{self.path} ({self.type})"


def file_system(pid: int) -> str:
    """The file system for which a process that is blocked in the kernel waits, as ``/shared
    (nfs4)``.

    The file system of the file that its system call uses. If that is not visible (a path is opened,
    a mapped page is read), the remote ones of its open files, and if there are none and it waits
    for FUSE, all of that kind. "" if nothing is known.

    Only links in /proc and the table of mounts are read: accessing the file system itself would
    block this process, too.
    """
    mounts = _mounts(pid)
    if path := file_of_call(pid):
        suspected = [_mount_of(path, mounts)]
    else:
        of_open = [_mount_of(path, mounts) for path in (*_open_files(pid), _link(pid, "cwd"))]
        suspected = [mount for mount in of_open if mount and _REMOTE.search(mount.type)]
        if not suspected and waits_for_fuse(wait_channel(pid)):
            suspected = [mount for mount in mounts if _FUSE.match(mount.type)]
    return " or ".join(dict.fromkeys(str(mount) for mount in suspected if mount))


def file_of_call(pid: int) -> str:
    """The file that the main thread's current system call reads or writes; "": none."""
    fd = _descriptor_of_call(pid)
    return _link(pid, f"fd/{fd}") if fd is not None else ""


def _descriptor_of_call(pid: int) -> int | None:
    # "0 0x3 0x7ffd…": number and arguments; "running"; "-1 …" outside of a call.
    number, _, arguments = _read(f"/proc/{pid}/syscall").partition(" ")
    if not number.isdecimal() or int(number) not in _CALLS_ON_FILES:
        return None
    return int(arguments.partition(" ")[0], 16)


def call_target(pid: int) -> str:
    """The object that the main thread's current system call reads or writes, for sentences: a path,
    "its standard input", "a pipe", "a socket"; "": none, or unknown."""
    fd = _descriptor_of_call(pid)
    if fd is None:
        return ""
    if fd == 0:
        return "its standard input"
    kind = _target(pid, f"fd/{fd}").partition(":")[0]
    return f"a {kind}" if kind in ("pipe", "socket") else _link(pid, f"fd/{fd}")


def waits_for_fuse(channel: str) -> bool:
    """Whether that wait channel is one of FUSE. A process that waits for its daemon is asleep
    (fs/fuse/dev.c, request_wait_answer), and not in state D, until it is sent a signal."""
    return channel.startswith(("request_wait_answer", "fuse_"))


def _open_files(pid: int) -> Iterator[str]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for name in names[:_MAX_FILES]:
        yield _link(pid, f"fd/{name}")


def _link(pid: int, name: str) -> str:
    """The path that a link of this process leads to; "" for pipes, sockets and memory."""
    path = _target(pid, name)
    return path if path.startswith("/") else ""


def _target(pid: int, name: str) -> str:
    """As the kernel writes it: a path, "pipe:[7]"; "" if the link no longer exists."""
    try:
        return os.readlink(f"/proc/{pid}/{name}")
    except OSError:
        return ""


def _mounts(pid: int) -> list[Mount]:
    """Mounts of the process's namespace. A later mount hides an earlier one at the same place."""
    mounts = {}
    for line in _read(f"/proc/{pid}/mountinfo").splitlines():
        about, _, kind = line.partition(" - ")
        fields = about.split()
        if len(fields) > 4 and kind:
            path = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), fields[4])
            mounts[path] = Mount(path, kind.split()[0])
    return list(mounts.values())


def _mount_of(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """The innermost mount that contains the path."""
    holding = [m for m in mounts if path == m.path or path.startswith(m.path.rstrip("/") + "/")]
    return max(holding, key=lambda m: len(m.path), default=None)


def describe_process(pid: int) -> dict[str, str]:
    """The process's state, for the report."""
    facts = {
        "state": _status(pid, "State"),
        "wait channel": wait_channel(pid),
        "memory (VmRSS)": _status(pid, "VmRSS"),
        "swapped (VmSwap)": _status(pid, "VmSwap"),
        "threads": _status(pid, "Threads"),
        "children": data_workers(pid),
        "system call": _read(f"/proc/{pid}/syscall").split(" ")[0].strip(),
        "file of the call": file_of_call(pid),
        "file system": file_system(pid) if _is_blocked(pid) else "",
    }
    return {name: value for name, value in facts.items() if value}


def describe_node() -> dict[str, str]:
    """Pressure, memory events, network errors: for the report."""
    facts: dict[str, str] = {
        "load": _read("/proc/loadavg").strip(),
        "uptime": f"{_uptime_s():.2f}",
        "TCP": _retransmissions(),
        "network interfaces": _interface_errors(_read("/proc/net/dev")),
    }
    try:
        facts["kernel log"] = "; ".join(relevant_lines(_kernel_log(), _uptime_s()))
    except OSError as error:
        facts["kernel log"] = f"cannot be read: {error.strerror} (see kernel.dmesg_restrict)"
    cgroup = _cgroup()
    for kind in ("cpu", "memory", "io"):
        facts[f"pressure ({kind})"] = _in_a_line(f"/proc/pressure/{kind}")
        facts[f"pressure ({kind}, cgroup)"] = _in_a_line(f"{cgroup}/{kind}.pressure")
    facts["memory events (cgroup)"] = _memory_events()
    return {name: value for name, value in facts.items() if value}


def free_disk_space(folders: Sequence[str]) -> dict[str, str]:
    """Free space, for the report. A file system that does not answer blocks the caller."""
    space = {}
    for folder in folders:
        try:
            usage = shutil.disk_usage(folder)
        except OSError as error:
            space[f"disk ({folder})"] = str(error)
        else:
            space[f"disk ({folder})"] = f"{usage.free >> 20} of {usage.total >> 20} MiB free"
    return space


def relevant_lines(log: Sequence[str], now_s: float) -> list[str]:
    """The last lines of the kernel's log that may explain a hang, with their age.

    ``log``: records of /dev/kmsg, "level,number,microseconds,…;text"; ``now_s`` since the start.

    >>> relevant_lines(["4,9,500000000,-;NVRM: Xid (PCI:0000:01): 79, GPU has fallen off"], 503.0)
    ['NVRM: Xid (PCI:0000:01): 79, GPU has fallen off (3 s ago)']
    """
    lines = []
    for record in log:
        about, _, text = record.partition(";")
        fields = about.split(",")
        line = text.partition("\n")[0]
        if len(fields) < 3 or not fields[2].isdecimal() or not is_relevant(line):
            continue
        age_s = now_s - int(fields[2]) * 1e-6
        if age_s < KERNEL_LOG_S:
            lines.append(f"{line} ({max(0.0, age_s):.0f} s ago)")
    return lines[-_LOG_LINES:]


def is_relevant(line: str) -> bool:
    """Whether a line of the kernel's log may explain a hang, or the end of a process."""
    return _RELEVANT.search(line) is not None


def _kernel_log() -> list[str]:
    """Every record. Raises OSError if this user may not read them (kernel.dmesg_restrict)."""
    records: list[str] = []
    fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                records.append(os.read(fd, 8192).decode(errors="replace"))
            except BrokenPipeError:
                continue  # it was overwritten: the next read begins at the oldest record
    except OSError:
        return records  # EAGAIN: that was the last one
    finally:
        os.close(fd)


def _uptime_s() -> float:
    return float(_read("/proc/uptime").split(" ")[0] or 0.0)


def _is_blocked(pid: int) -> bool:
    times = process_times(pid)
    return times is not None and times.state == "D"


def _cgroup(controller: str = "") -> str:
    """The folder of this process's cgroup: of version 2, or of a controller of version 1."""
    for line in _read("/proc/self/cgroup").splitlines():  # "0::/path", "4:memory:/path"
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controller in controllers.split(","):
            return os.path.join(_CGROUPS, controller, path.strip("/")).rstrip("/")
    return os.path.join(_CGROUPS, controller).rstrip("/")


def _memory_events() -> str:
    """``oom 0; oom_kill 0`` and more, of this process's cgroup. In a container the path may be the
    host's, while the container's own cgroup is mounted."""
    files = (
        f"{_cgroup()}/memory.events",
        f"{_CGROUPS}/memory.events",
        f"{_cgroup('memory')}/memory.oom_control",
        f"{_CGROUPS}/memory/memory.oom_control",
    )
    return next(filter(None, map(_in_a_line, files)), "")


def _in_a_line(path: str) -> str:
    return "; ".join(_read(path).split("\n")).strip("; ")


def _interface_errors(table: str) -> str:
    """Errors and drops of interfaces since the machine started, if there were any.

    >>> _interface_errors("head\\nhead\\n  eth0: 99 5 1 2 0 0 0 0 99 5 3 4 0 0 0 0\\n    lo: 9 1")
    'eth0: 1 errors and 2 drops received, 3 and 4 sent'
    """
    errors = []
    for line in table.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        fields = numbers.split()
        if len(fields) < 12:
            continue
        received, sent = fields[2:4], fields[10:12]
        if any(number != "0" for number in received + sent):
            errors.append(
                f"{name.strip()}: {received[0]} errors and {received[1]} drops received, "
                f"{sent[0]} and {sent[1]} sent"
            )
    return "; ".join(errors)


def _retransmissions() -> str:
    """Retransmitted TCP segments since the machine started."""
    lines = [line.split() for line in _read("/proc/net/snmp").splitlines() if line[:4] == "Tcp:"]
    if len(lines) != 2:
        return ""
    values = dict(zip(*lines, strict=False))
    return (
        f"{values.get('RetransSegs', '?')} of {values.get('OutSegs', '?')} segments retransmitted"
    )


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
