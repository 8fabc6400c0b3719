"""The owner of a checkpoint folder: one job at a time; a second one is refused.

Rank 0 keeps a record in the folder and increments its counter every few seconds. Another job that
finds a record watches the counter: if it changes, its owner is alive, and the job is refused. A run
id alone proves nothing, since two jobs may be started with one by mistake.

There is no wait where the owner is known to have ended, or to be this job:

- it has released the folder;
- it is a job of the same run id in the same etcd (:data:`INSTANCE`), where agents see to it that
  there is one rank 0;
- a process whose end ends its heartbeat has ended on this machine: that of rank 0, or the one that
  a job on one node cannot outlive (the launcher, or a plain ``python train.py``);
- it has the same run id, and its record has not changed for :data:`OWNER_SILENCE_S`, by the clock
  of the storage.

Before it commits, rank 0 reads the record again: a job that was stopped, and replaced in the
meantime, saves nothing more.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace

from checkpoints import CheckpointError, Storage
from checkpoints.storage.patient import patient
from checkpoints.storage.small_files import read_record, write_record
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import ConfigError
from elastic.telemetry.log import get_logger
from elastic.tuning.worker_intervals import (
    OWNER_HEARTBEAT_S,
    OWNER_JOIN_S,
    OWNER_LOOK_S,
    OWNER_SILENCE_S,
    OWNER_WATCH_S,
)
from elastic.world.world import is_launched, node_name

OWNER_FILE = ".owner.json"
INSTANCE = "ELASTIC_RUN_INSTANCE"  # set by agents: the same for all that share a run and an etcd
_PROBE_FILE = ".owner-clock"


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The contents of the record."""

    run_id: str
    node: str  # the node of rank 0
    # The process that the job cannot outlive: boot id, pid namespace, pid, start time; "" if none.
    process: str
    writer: str = ""  # the process of rank 0, in the same form
    instance: str = ""  # of the run, among those with the same run id; "" if unknown
    counter: int = 0
    is_released: bool = False
    running_s: float = 0.0  # how long the job has run, over all its processes
    failures: int = 0  # broken worlds of the job


class Ownership:
    """One process's claim to a folder. ``report`` is called once if another job has taken it."""

    def __init__(
        self,
        storage: Storage,
        report: Callable[[str], object],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._storage = patient(storage)
        self._report = report
        self._clock = clock
        self._process = _job_process()
        self._run_id = os.environ.get("TORCHELASTIC_RUN_ID") or f"local {self._process}"
        self._before = Owner(
            run_id=self._run_id,
            node=node_name(),
            process=self._process,
            writer=_process(os.getpid()),
            instance=os.environ.get(INSTANCE, ""),
        )
        self._checked_s = -math.inf
        self._began_s = clock.monotonic()
        self._has_claimed = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.failures: Callable[[], int] = lambda: 0  # broken worlds of this process
        self.is_lost = False

    def claim(self) -> Owner | None:
        """Claim the folder for this job; returns the job's earlier record, if any.

        Raises ConfigError if another job saves to it, after at most OWNER_WATCH_S.
        """
        found = self._read()
        if found is not None and (watch_s := self._watch_s(found)) > 0:
            if watch_s == OWNER_SILENCE_S:
                watch_s -= self._unchanged_s()
            self._watch(found, watch_s)
        self._adopt(found)
        self._has_claimed = True
        self.heartbeat()
        return self._before if found is not None else None

    def _adopt(self, found: Owner | None) -> None:
        if found is not None:
            self._before = replace(
                self._before,
                running_s=found.running_s,
                failures=found.failures + (not found.is_released),
            )

    def hold(self) -> None:
        """Keep updating the record, on a separate thread, until :meth:`close`."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, name="checkpoint-owner", daemon=True)
        self._thread.start()

    def heartbeat(self, *, release: bool = False) -> None:
        """Increment the record's counter. The saves report a folder that is not writable."""
        try:
            found = self._read()
            if self._still_owns(found):
                self._write(found, release=release)
        except (CheckpointError, OSError):
            return

    def _write(self, found: Owner | None, *, release: bool) -> None:
        owner = replace(
            self._before,
            counter=(found.counter if found is not None else 0) + 1,
            is_released=release,
            running_s=self._before.running_s + self._clock.monotonic() - self._began_s,
            failures=self._before.failures + self.failures(),
        )
        write_record(self._storage, OWNER_FILE, json.dumps(asdict(owner)).encode())

    def may_commit(self) -> bool:
        """Whether the folder is still this job's. Called before each commit, on rank 0: without its
        share, the other ranks commit nothing."""
        now_s = self._clock.monotonic()
        is_due = self._has_claimed and now_s - self._checked_s > OWNER_LOOK_S
        if self._thread is not None and not self.is_lost and is_due:
            with contextlib.suppress(CheckpointError):  # unknown: the heartbeats check it, too
                self._still_owns(self._read())
            self._checked_s = now_s
        return not self.is_lost

    def _still_owns(self, found: Owner | None) -> bool:
        """Whether the record is this job's. Reports once if it is not."""
        if found is None or self._thread is None or not self._is_of_another_job(found):
            return not self.is_lost
        if not self.is_lost:
            self.is_lost = True
            self._report(
                f"{self._storage.place} was taken over by {_describe(found)}: this job no "
                "longer saves to it"
            )
        return False

    def close(self, *, release: bool) -> None:
        """Stop updating. ``release``: the job has ended, and the folder is free."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(timeout=OWNER_JOIN_S)  # a disk may hang; the thread is a daemon
        if release and not self._thread.is_alive() and not self.is_lost:
            self.heartbeat(release=True)

    def _run(self) -> None:
        if not self._has_claimed:  # an earlier rank 0 of this job has
            with contextlib.suppress(CheckpointError):  # reported by the saves
                self._succeed(self._read())
        while not self.is_lost and not self._stop.wait(OWNER_HEARTBEAT_S):
            self.heartbeat()

    def _succeed(self, found: Owner | None) -> None:
        """Take the record over from the rank 0 of an earlier world, in which this process was."""
        own = self._before
        if found is not None and (found.run_id, found.instance) != (own.run_id, own.instance):
            self._still_owns(found)
        else:
            self._adopt(found)
            self._write(found, release=False)
            self._has_claimed = True

    def _is_of_another_job(self, found: Owner) -> bool:
        """Whether another job has written the record, which may have ended."""
        own = self._before
        if found.is_released:
            return False
        if found.run_id != own.run_id:
            return True
        if found.process != own.process != "" and _is_alive(found.process) is True:
            return True
        is_own = found.writer == own.writer != "" or found.instance == own.instance != ""
        return not is_own

    def _watch_s(self, found: Owner) -> float:
        """How long the record must stay unchanged before this job may claim the folder."""
        if not self._is_of_another_job(found):
            return 0.0
        if found.run_id != self._run_id:
            return 0.0 if _is_alive(found.process) is False else OWNER_WATCH_S
        has_ended = False in (_is_alive(found.process), _is_alive(found.writer))
        is_restart = found.process == self._process != ""  # by the same launcher
        return 0.0 if has_ended or is_restart else OWNER_SILENCE_S

    def _unchanged_s(self) -> float:
        """How long ago the record was written, by the clock of the storage; 0 if unknown."""
        try:
            write_record(self._storage, _PROBE_FILE, b"")
            now_s = self._storage.modified_s(_PROBE_FILE)
            self._storage.remove(_PROBE_FILE)
            return max(0.0, now_s - self._storage.modified_s(OWNER_FILE))
        except (CheckpointError, OSError):
            return 0.0

    def _watch(self, found: Owner, watch_s: float) -> None:
        if watch_s <= 0:
            return
        get_logger().warning(
            "%s was last used by %s, which has not reported its end: waiting up to %g s to see "
            "whether it still saves there",
            *(self._storage.place, _describe(found), watch_s),
        )
        until_s = self._clock.monotonic() + watch_s
        while self._clock.monotonic() < until_s:
            self._clock.sleep(OWNER_LOOK_S)
            now = self._read()
            if now is None or self._watch_s(now) <= 0:
                return
            if now.counter != found.counter:
                raise ConfigError(
                    f"another job saves to {self._storage.place}: {_describe(now)}",
                    hint="use a separate folder for each job; to continue that job, end it first",
                )

    def _read(self) -> Owner | None:
        data = read_record(self._storage, OWNER_FILE)
        try:
            values = json.loads(data or b"")
            # Earlier versions wrote no writer and no instance.
            values = {"writer": "", "instance": "", **values}
            known = {field.name: values[field.name] for field in fields(Owner)}
        except (ValueError, KeyError, TypeError):
            return None  # no record yet, or unreadable
        owner = Owner(**known)
        texts = (owner.run_id, owner.node, owner.process, owner.writer, owner.instance)
        counts = (owner.counter, owner.failures)
        is_sane = all(isinstance(text, str) for text in texts)
        is_sane = is_sane and all(type(count) is int and count >= 0 for count in counts)
        return owner if is_sane and isinstance(owner.running_s, (int, float)) else None


def _describe(owner: Owner) -> str:
    return f"job {owner.run_id!r}, rank 0 on node {owner.node}"


def _job_process() -> str:
    """The process that this job cannot outlive; "" if there is none, or it is unknown."""
    if not is_launched():
        return _process(os.getpid())
    nodes = os.environ.get("ELASTIC_MAX_NODES") or os.environ.get("GROUP_WORLD_SIZE")
    return _process(_launcher()) if nodes == "1" else ""


def _launcher() -> int:
    """The pid of the nearest ancestor that was not launched itself; 0 if unknown.

    The parent may be a wrapper that ends with this process.
    """
    pid = os.getppid()
    while pid and b"TORCHELASTIC_RUN_ID=" in _read_bytes(f"/proc/{pid}/environ"):
        pid = _parent_of(pid)
    return pid


def _process(pid: int) -> str:
    """A globally unique identifier of a process; "" if it has ended."""
    state, _, start = _stat(pid)
    boot = _read_bytes("/proc/sys/kernel/random/boot_id").decode().strip()
    if state in "ZX" or not boot:
        return ""
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {pid} {start}"


def _parent_of(pid: int) -> int:
    return int(_stat(pid)[1])


def _stat(pid: int) -> tuple[str, str, str]:
    """State, parent and start time of a process; state X if it has ended."""
    # The command, in parentheses, may contain any character.
    text = _read_bytes(f"/proc/{pid}/stat").decode(errors="replace")
    stat = text.rpartition(")")[2].split()
    return (stat[0], stat[1], stat[19]) if len(stat) > 19 else ("X", "0", "")


def _read_bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _is_alive(process: str) -> bool | None:
    """Whether a process of an owner is alive; None if that is unknown on this node."""
    *place, pid, _ = ["", "", *process.split()]
    here = _process(os.getpid()).split()[:2]
    if place[2:] != here or not pid.isdigit():
        return None
    return _process(int(pid)) == process
