"""Turns the reports of all ranks into findings. Pure.

If an operation does not end, all waiting ranks report the same, whichever rank is at fault.
So ranks that cannot take part are named first (dead, stopped), then ranks with their own error,
then ranks that are behind the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from elastic.doctor.findings import Finding, failed, ok, skipped, warning
from elastic.tuning.memory import human

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
