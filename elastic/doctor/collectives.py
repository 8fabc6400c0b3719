"""Collectives between all nodes: the ranks, their session, and what their outcomes mean."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from elastic.agent.identity import PortReserve
from elastic.child_interpreters import module_command
from elastic.doctor.checks import Finding, Status, failed, ok, skipped, warning
from elastic.doctor.network import AllGather, Participant
from elastic.errors import SYSTEM_CLOCK, Clock
from elastic.tuning.environment import human
from elastic.tuning.intervals import (
    DOCTOR_MIN_WAIT_S,
)

# Rank processes start: the import of torch on a busy machine.
DOCTOR_START_S = 120.0
# After one rank has failed the others cannot succeed; they may still report their operation.
DOCTOR_OTHER_RANKS_S = 2.0
# A rank process that has closed its output ends, or is killed.
DOCTOR_END_S = 2.0
# The ranks of one node may finish at once while those of another wait for their deadline.
DOCTOR_EXCHANGE_MARGIN_S = 15.0
# Polling interval for the output of ranks that mpirun has started.
DOCTOR_MPI_POLL_S = 0.1

# ----------------------------------------------------------------------------
# Turns the reports of all ranks into findings. Pure.
#
# If an operation does not end, all waiting ranks report the same, whichever rank is at fault.
# So ranks that cannot take part are named first (dead, stopped), then ranks with their own error,
# then ranks that are behind the others.

RUNNING, STOPPED, ENDED = "running", "stopped", "ended"
# Fraction for the largest message between two machines. A plain stream has no copies.
_MIN_SHARE_OF_RAW = 0.25


@dataclass(frozen=True, kw_only=True)
class Result:
    """An operation that has ended on one rank."""

    operation: str
    took_ms: float = 0.0
    wrong: str = ""
    unsupported: str = ""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed between rank 0 and ``peer``."""

    peer: int
    size: int
    torch_ms: float
    raw_ms: float


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """The state of a rank after a group of operations, or at the deadline."""

    rank: int
    node: str
    pid: int
    state: str  # RUNNING, STOPPED or ENDED, with how_ended
    how_ended: str = ""
    is_done: bool = False
    entered: int = 0  # how many times it has entered an operation
    operation: str = ""  # the last one that it entered
    peer: int | None = None  # the rank that it waits for, if it is a single one
    error: str = ""
    results: tuple[Result, ...] = ()
    speeds: tuple[Speed, ...] = ()
    peak_bytes: int = 0

    @property
    def name(self) -> str:
        where = f"node {self.node}, " if self.node else ""
        return f"rank {self.rank} ({where}pid {self.pid})"


def findings(
    label: str, ranks: Sequence[RankOutcome], expected: Sequence[str], waited_s: float
) -> list[Finding]:
    """One finding per operation of a group. ``label``: the backend."""
    found = []
    stuck = stuck_in(ranks)
    for operation in expected:
        name = f"{label} {operation}"
        results = [r for rank in ranks for r in rank.results if r.operation == operation]
        bad = [(p, r) for p in ranks for r in p.results if r.operation == operation and r.wrong]
        if operation == stuck:
            found.append(failed(name, blame(ranks, waited_s), _remedy(ranks)))
        elif bad:
            rank, result = bad[0]
            found.append(failed(name, f"wrong result on {rank.name}: {result.wrong}", _BAD_DATA))
        elif results and results[0].unsupported:
            found.append(skipped(name, results[0].unsupported))
        elif len(results) == len(ranks):
            slowest = max(r.took_ms for r in results)
            found.append(ok(name, f"correct on {len(ranks)} ranks, {slowest:.1f} ms"))
        else:
            found.append(skipped(name, f"not reached: {stuck or 'the ranks'} did not end"))
    return found


_BAD_DATA = (
    "a link or memory corrupts data: replace the named node, and check `ethtool -S`, "
    "ECC counters and NIC offloads"
)


def stuck_in(ranks: Iterable[RankOutcome]) -> str:
    """The operation in which the group ended early; "" if it did not."""
    late = [rank for rank in ranks if not rank.is_done or rank.error]
    if not late:
        return ""
    return min(late, key=lambda rank: rank.entered or 1 << 30).operation or "start"


def blame(ranks: Sequence[RankOutcome], waited_s: float) -> str:
    """Why the group did not end, in a sentence that names the rank.

    >>> from dataclasses import replace
    >>> waits = RankOutcome(rank=0, node="a", pid=7, state=RUNNING, operation="all_reduce")
    >>> stopped = RankOutcome(rank=1, node="b", pid=8, state=STOPPED, operation="all_reduce")
    >>> blame([replace(waits, entered=5), replace(stopped, entered=5)], 20.0)
    'no result within 20 s: rank 1 (node b, pid 8) is stopped; rank 0 waits in all_reduce'
    """
    culprits, why = _culprits(ranks)
    named = "; ".join(f"{rank.name} {why(rank)}" for rank in culprits)
    late = [r for r in ranks if not r.is_done and not r.error and r.operation]
    waiting = [r for r in late if r not in culprits]
    waits = "".join(
        f"; rank {r.rank} waits in {r.operation}"
        + (f" for rank {r.peer}" if r.peer is not None else "")
        for r in waiting[:4]
    )
    ended_at_once = any(r.error or r.state == ENDED for r in culprits)
    return f"{'' if ended_at_once else f'no result within {waited_s:g} s: '}{named}{waits}"


def _culprits(
    ranks: Sequence[RankOutcome],
) -> tuple[list[RankOutcome], Callable[[RankOutcome], str]]:
    for state in (ENDED, STOPPED):
        if found := [rank for rank in ranks if rank.state == state]:
            return found, lambda rank: rank.how_ended or f"is {rank.state}"
    if found := [rank for rank in ranks if rank.error]:
        return found[:1], lambda rank: f"failed in {rank.operation}: {rank.error}"
    late = [rank for rank in ranks if not rank.is_done]
    least = min(rank.entered for rank in late)
    behind = [rank for rank in late if rank.entered == least]
    if least == 0:
        return behind, lambda rank: "has not started"
    if len(behind) < len(late) or len(late) < len(ranks):
        return behind, lambda rank: f"is behind the others, in {rank.operation}{_for(rank)}"
    return late, lambda rank: f"waits in {rank.operation}{_for(rank)}"


def _for(rank: RankOutcome) -> str:
    return f" for rank {rank.peer}" if rank.peer is not None else ""


def _remedy(ranks: Sequence[RankOutcome]) -> str:
    states = {rank.state for rank in ranks}
    if STOPPED in states:
        return "continue the named process (kill -CONT), or end it and find what stopped it"
    if ENDED in states:
        return "check `dmesg` and the memory limit of the named node"
    return (
        "open all ports between the nodes, and set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
        "to the interface that has the node's address"
    )


# Speed and memory -----------------------------------------------------------------------------


def of_speed(label: str, ranks: Sequence[RankOutcome], *, is_one_machine: bool) -> list[Finding]:
    """One finding per peer of rank 0, with the smallest and the largest message."""
    speeds = [speed for rank in ranks for speed in rank.speeds]
    found = []
    for peer in sorted({speed.peer for speed in speeds}):
        ordered = sorted((s for s in speeds if s.peer == peer), key=lambda s: s.size)
        found.append(_of_pair(label, peer, ordered[0], ordered[-1], is_one_machine=is_one_machine))
    return found


def _of_pair(label: str, peer: int, small: Speed, large: Speed, *, is_one_machine: bool) -> Finding:
    name = f"{label} speed 0-{peer}"
    torch_rate, raw_rate = rate(large.size, large.torch_ms), rate(large.size, large.raw_ms)
    measured = (
        f"{human(small.size)}: {small.torch_ms * 1000:.0f} µs (raw TCP {small.raw_ms * 1000:.0f} "
        f"µs); {human(large.size)}: {torch_rate:.2f} GB/s (raw TCP {raw_rate:.2f} GB/s)"
    )
    if not is_one_machine and torch_rate < _MIN_SHARE_OF_RAW * raw_rate:
        return warning(
            name,
            measured,
            "another interface may be in use: set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
        )
    return ok(name, measured)


def rate(size: int, milliseconds: float) -> float:
    """In GB/s.

    >>> rate(1_000_000, 1.0)
    1.0
    """
    return size / milliseconds / 1e6


def of_memory(label: str, ranks: Sequence[RankOutcome]) -> list[Finding]:
    """The peak memory of each rank, including torch itself."""
    peaks = [rank.peak_bytes for rank in ranks if rank.peak_bytes]
    if not peaks:
        return []
    return [ok(f"{label} memory", f"at most {human(max(peaks))} in a rank, torch included")]


# ----------------------------------------------------------------------------
# This node's ranks: starts them, sends them operations, and kills them at a deadline.

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
            module_command("elastic.doctor.rank", [json.dumps(config)]),
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


# ----------------------------------------------------------------------------
# The same operations on MPI, whose processes only ``mpirun`` can start: on one machine.
#
# torch's wheels are built without MPI. With MPI, each rank writes its progress to a file;
# ranks receive no commands and are killed after an idle timeout.

NAME = "mpi operations"
MPIRUN = "mpirun"
# A container's only user is root, and a laptop has fewer cores than ranks: Open MPI refuses both.
_ALLOW = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
_LOG_CHARACTERS = 300


def why_not(*, has_mpi: bool, nodes: int) -> str:
    """Why MPI is not tested; "" if it is."""
    if not has_mpi:
        return "not available, because this torch is built without MPI (as all of its wheels are)"
    if nodes > 1:
        return "mpirun connects nodes itself: start the doctor on one node, without --nnodes"
    if shutil.which(MPIRUN) is None:
        return f"not available, because there is no {MPIRUN} in PATH to start its processes"
    return ""


def examine(
    ranks: int, expected: tuple[str, ...], silence_s: float, clock: Clock = SYSTEM_CLOCK
) -> list[Finding]:
    """Run all operations on ``ranks`` ranks of this machine and return the findings."""
    with tempfile.TemporaryDirectory(prefix="elastic-doctor-mpi-") as folder:
        config = json.dumps({"backend": "mpi", "folder": folder})
        program = module_command("elastic.doctor.rank", [config])
        with open(Path(folder) / "log", "wb") as log:
            process = subprocess.Popen(
                [MPIRUN, "-n", str(ranks), *program],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**_ALLOW, **os.environ},
                start_new_session=True,
            )
        try:
            _wait_while_they_write(process, Path(folder), ranks, silence_s, clock)
            found = _outcomes(Path(folder), ranks)  # before they are ended
        finally:
            _end(process)
        text = (Path(folder) / "log").read_text(errors="replace").strip()[-_LOG_CHARACTERS:]
    if not any(one.pid for one in found):
        return [skipped(NAME, f"not available, because {MPIRUN} started nothing: {text}")]
    return findings("mpi", found, expected, silence_s)


def _wait_while_they_write(
    process: subprocess.Popen[bytes], folder: Path, ranks: int, silence_s: float, clock: Clock
) -> None:
    """Wait until all ranks have ended, or none has written anything for ``silence_s`` (longer while
    torch is imported)."""
    before, since_s = 0, clock.monotonic()
    while process.poll() is None:
        sizes = [file.stat().st_size for file in folder.glob("rank-*")]
        if sum(sizes) != before:
            before, since_s = sum(sizes), clock.monotonic()
        have_started = len(sizes) == ranks and all(sizes)
        if clock.monotonic() - since_s > (silence_s if have_started else DOCTOR_START_S):
            return
        clock.sleep(DOCTOR_MPI_POLL_S)


def _outcomes(folder: Path, ranks: int) -> list[RankOutcome]:
    return [_outcome(folder / f"rank-{rank}", rank) for rank in range(ranks)]


def _outcome(file: Path, rank: int) -> RankOutcome:
    found = RankOutcome(rank=rank, node="", pid=0, state=RUNNING)
    try:
        lines = file.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return replace(found, state=ENDED, how_ended="was not started")
    for line in lines:
        if not line.endswith("\n"):
            break  # it is being written
        message = json.loads(line)
        if message["event"] == "ready":
            found = replace(found, pid=int(message["pid"]))
        else:
            found = noted(found, message)
    has_ended = not found.is_done and not os.path.exists(f"/proc/{found.pid}")
    return replace(found, state=ENDED, how_ended="has ended") if has_ended else found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End mpirun with SIGTERM, on which it ends its ranks: they may be outside of its process
    group. Stopped processes in the group do not receive it."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DOCTOR_END_S)


# ----------------------------------------------------------------------------
# Runs the operations of one backend over all nodes: group by group, in step on every node.
#
# After each group all nodes exchange the results of their ranks. If any has failed, all nodes
# start new processes for the next group: so one hanging operation does not hide the results of
# others.

# Listed here, too: their functions live in a module that imports torch.
OPERATIONS = (
    "send/recv",
    "isend/irecv",
    "broadcast",
    "reduce",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "scatter",
    "gather",
    "all_to_all",
    "barrier",
    "new_group",
)


@dataclass(frozen=True, kw_only=True)
class TransferMeasurement:
    """One row of the table of speeds, between rank 0 and ``peer``."""

    backend: str
    peer: int
    size_bytes: int
    torch_ms: float
    raw_ms: float


@dataclass(frozen=True)
class Session:
    """The nodes, this node's number, and their communication. ``shared``: a shared folder."""

    members: tuple[Participant, ...]
    number: int
    exchange: AllGather
    silence_s: float
    shared: str | None
    say: Callable[[str], None]

    @property
    def size(self) -> int:
        return sum(member.nproc for member in self.members)

    def layout(self, backend: str) -> RankLayout:
        addresses = tuple(m.address for m in self.members for _ in range(m.nproc))
        me = self.members[self.number]
        return RankLayout(
            backend=backend,
            first_rank=sum(m.nproc for m in self.members[: self.number]),
            local=me.nproc,
            addresses=addresses,
            node=me.name if len(self.members) > 1 else "",
        )


class NodeMissing(Exception):
    """A node has left during the session. ``progress``: of all ranks."""

    def __init__(self, progress: tuple[RankOutcome, ...]) -> None:
        super().__init__("a node is missing")
        self.progress = progress


def torch_findings(session: Session) -> tuple[list[Finding], list[TransferMeasurement]]:
    """Run on gloo, on NCCL if every rank has its own GPU, and on MPI if torch has it."""
    if session.size < 2:
        return [
            skipped("process group", "only one rank: pass --nproc-per-node=2 or --nnodes=2")
        ], []
    backend = _Backend(session, "gloo")
    try:
        found, measured, builds = backend.run()
    finally:
        backend.close()
    found += _equal_builds(builds)
    for number, build in sorted(builds.items()):
        member = session.members[number]
        node = member.name if len(session.members) > 1 else ""
        found += [replace(one, node=node) for one in gpu_findings(build)]
    reason = _why_no_nccl(session, builds)
    if reason:
        found.append(skipped("nccl operations", reason))
    else:
        backend = _Backend(session, "nccl")
        try:
            nccl_found, nccl_measured, _ = backend.run()
        finally:
            backend.close()
        found, measured = found + nccl_found, measured + nccl_measured
    has_mpi = any(build["mpi"] for build in builds.values())
    return [*found, *_on_mpi(session, has_mpi=has_mpi)], measured


def _on_mpi(session: Session, *, has_mpi: bool) -> list[Finding]:
    if why := why_not(has_mpi=has_mpi, nodes=len(session.members)):
        return [skipped(NAME, why)]
    session.say("mpi: operations")
    return examine(session.size, OPERATIONS, session.silence_s)


def gpu_findings(build: Mapping[str, Any]) -> list[Finding]:
    """Whether torch sees a node's GPUs, and whether they compute; nothing without GPUs."""
    name, count = "GPUs in torch", build["gpus"]
    if build["gpu_errors"]:
        remedy = "`nvidia-smi -q`, `dmesg | grep Xid`; reset or replace the device"
        return [failed(name, "; ".join(build["gpu_errors"]), remedy)]
    if count:
        return [ok(name, f"{count}, each computes a test product correctly")]
    if not build["has_driver"]:
        return []
    cuda = f"built for CUDA {build['cuda']}" if build["cuda"] else "built without CUDA"
    return [
        warning(
            name,
            f"none, although a driver is installed: torch {build['torch']} is {cuda}",
            "install a torch for this driver's CUDA, and check CUDA_VISIBLE_DEVICES",
        )
    ]


def _why_no_nccl(session: Session, builds: Mapping[int, Mapping[str, Any]]) -> str:
    if len(builds) < len(session.members):
        return "the ranks did not start"
    if not all(build["nccl"] for build in builds.values()):
        return "torch is built without NCCL"
    for number, build in builds.items():
        if build["gpus"] < session.members[number].nproc:
            where = f" on {session.members[number].name}" if len(session.members) > 1 else ""
            return f"{build['gpus']} GPUs for {session.members[number].nproc} ranks{where}"
    return ""


def _equal_builds(builds: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Compare NCCL and CUDA versions, which are part of torch."""
    if len(builds) < 2:
        return []
    name = "equal NCCL and CUDA"
    texts = {
        number: f"torch {b['torch']}, CUDA {b['cuda'] or 'none'}, NCCL {b['nccl'] or 'none'}"
        for number, b in sorted(builds.items())
    }
    if len(set(texts.values())) == 1:
        return [ok(name, next(iter(texts.values())))]
    measured = "; ".join(f"node {number}: {text}" for number, text in texts.items())
    return [failed(name, measured, "use one image on all nodes")]


class _Backend:
    """One backend's groups of operations."""

    def __init__(self, session: Session, name: str) -> None:
        self._session, self._name = session, name
        self._ranks: Ranks | None = None
        self._starts = 0

    def run(self) -> tuple[list[Finding], list[TransferMeasurement], dict[int, Mapping[str, Any]]]:
        """Run all groups; returns findings, speeds and the build facts of every node's torch."""
        found: list[Finding] = []
        speeds: list[TransferMeasurement] = []
        builds: dict[int, Mapping[str, Any]] = {}
        for group, expected in self._groups():
            self._session.say(f"{self._name}: {group}")
            if self._ranks is None:
                builds, problem = self._start()
                if problem is not None:
                    return [*found, problem], speeds, builds
            try:
                progress = self._run_group(group)
            except NodeMissing as missing:
                self.close()
                found += self._findings(group, expected, missing.progress)
                found.append(
                    skipped(f"{self._name} after that", "a node has left: start the doctor again")
                )
                return found, speeds, builds
            of_group = self._findings(group, expected, progress)
            found += of_group
            has_no_group = all(one.status is not Status.OK for one in of_group)
            if group == "initialisation" and has_no_group:
                self.close()
                why = "no process group can be created: see the remedy above"
                found.append(skipped(f"{self._name} after that", why))
                break
            speeds += [self._measured(speed) for p in progress for speed in p.speeds]
        self.close()
        if not self._session.shared:
            found.append(skipped(f"{self._name} init file://", "no shared folder (--checkpoints)"))
        return found, speeds, builds

    def close(self) -> None:
        """End this node's ranks."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def _groups(self) -> list[tuple[str, Sequence[str]]]:
        return [
            ("initialisation", self._initialisations()),
            ("operations", OPERATIONS),
            ("speed", ("speed",)),
        ]

    def _initialisations(self) -> list[str]:
        return ["init env://", "init tcp://"] + (["init file://"] if self._session.shared else [])

    def _start(self) -> tuple[dict[int, Mapping[str, Any]], Finding | None]:
        self._starts += 1
        self._ranks = Ranks(self._session.layout(self._name))
        is_ready = self._ranks.wait_until_ready()
        own = {
            "build": self._ranks.builds[0] if is_ready else None,
            "why": "" if is_ready else _why_not_ready(self._ranks.progress()),
        }
        everyone = self._session.exchange(
            f"{self._name} ready {self._starts}", own, DOCTOR_START_S + DOCTOR_EXCHANGE_MARGIN_S
        )
        builds = {n: v["build"] for n, v in everyone.items() if v["build"] is not None}
        if len(builds) == len(self._session.members):
            return builds, None
        return builds, self._not_started(everyone)

    def _not_started(self, everyone: Mapping[int, Any]) -> Finding:
        self.close()
        whys = []
        for number, member in enumerate(self._session.members):
            where = f"node {member.name}: " if len(self._session.members) > 1 else ""
            if number not in everyone:
                whys.append(f"{where}it no longer answers")
            elif everyone[number]["why"]:
                whys.append(f"{where}{everyone[number]['why']}")
        return failed(
            f"{self._name} start",
            f"not all ranks have started: {'; '.join(whys)}",
            "run `python -c 'import torch'` there; check its load and memory",
        )

    def _run_group(self, group: str) -> tuple[RankOutcome, ...]:
        session = self._session
        assert self._ranks is not None
        with contextlib.ExitStack() as held:
            ports: tuple[int, ...] = ()
            if session.number == 0:
                reserve = PortReserve(2)
                held.callback(reserve.close)
                ports = reserve.ports
            label = f"{self._name} {group}"
            served = session.exchange(f"{label} ports", ports, session.silence_s)
            if 0 not in served:
                raise NodeMissing(self._of_missing(served.keys()))
            methods = self._methods(group, served[0])
            own = self._ranks.run(group, methods, self._silence_s(group))
            within_s = self._silence_s(group) + DOCTOR_EXCHANGE_MARGIN_S
            everyone = session.exchange(f"{label} outcome", [asdict(p) for p in own], within_s)
        if len(everyone) < len(session.members):
            raise NodeMissing(_merged(everyone) + self._of_missing(everyone.keys()))
        progress = _merged(everyone)
        if any(not p.is_done or p.error for p in progress):
            self.close()  # the ranks are out of step: the next group starts new ones
        return progress

    def _silence_s(self, group: str) -> float:
        """The longest silence of a rank: in the group ``speed``, all but two ranks wait."""
        pairs = max(self._session.size - 1, 1) if group == "speed" else 1
        return self._session.silence_s * pairs

    def _methods(self, group: str, ports: Sequence[int]) -> list[str]:
        address = self._session.members[0].address
        host = f"[{address}]" if ":" in address else address
        if group != "initialisation":
            return [f"tcp://{host}:{ports[0]}"]
        methods = [f"env://{host}:{ports[0]}", f"tcp://{host}:{ports[1]}"]
        if self._session.shared:
            methods.append(f"file://{self._session.shared}/{self._name}-{self._starts}")
        return methods

    def _of_missing(self, there: Any) -> tuple[RankOutcome, ...]:
        """The ranks of nodes that have not answered."""
        found: list[RankOutcome] = []
        first = 0
        for number, member in enumerate(self._session.members):
            if number not in there:
                found += [
                    RankOutcome(
                        rank=first + local,
                        node=member.name,
                        pid=0,
                        state=ENDED,
                        how_ended="no longer answers: its doctor has ended or is stopped",
                    )
                    for local in range(member.nproc)
                ]
            first += member.nproc
        return tuple(found)

    def _findings(
        self, group: str, expected: Sequence[str], progress: Sequence[RankOutcome]
    ) -> list[Finding]:
        waited_s = self._silence_s(group)
        found = findings(self._name, progress, expected, waited_s)
        if group == "speed" and found[0].status is Status.OK:
            is_one = len({m.address for m in self._session.members}) == 1
            found = of_speed(self._name, progress, is_one_machine=is_one)
            found += of_memory(self._name, progress)
        return found

    def _measured(self, speed: Speed) -> TransferMeasurement:
        return TransferMeasurement(
            backend=self._name,
            peer=speed.peer,
            size_bytes=speed.size,
            torch_ms=speed.torch_ms,
            raw_ms=speed.raw_ms,
        )


def _why_not_ready(ranks: Sequence[RankOutcome]) -> str:
    ended = [f"{p.name} {p.how_ended or f'is {p.state}'}" for p in ranks if p.state != RUNNING]
    return ", ".join(ended) or "torch is still starting"


def _merged(everyone: Mapping[int, Any]) -> tuple[RankOutcome, ...]:
    """The ranks of all nodes, in order."""
    found = [_progress(value) for values in everyone.values() for value in values]
    return tuple(sorted(found, key=lambda progress: progress.rank))


def _progress(value: Mapping[str, Any]) -> RankOutcome:
    results = tuple(Result(**one) for one in value["results"])
    speeds = tuple(Speed(**one) for one in value["speeds"])
    return RankOutcome(**{**value, "results": results, "speeds": speeds})
