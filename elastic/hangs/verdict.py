"""Decides from stacks, phases and flight records who hangs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from elastic.hangs.page import (
    IDLE_SHARE,
    BudgetPolicy,
    Flag,
    KernelFacts,
    Phase,
    RankFacts,
    budget_s,
    lost_message_s,
    mismatch_s,
    suspicion_s,
)

# ----------------------------------------------------------------------------
# torch's flight recorder: the recent collectives of each rank, and where ranks differ.
#
# Pure. torch keeps the last 2000 collectives of each process, of gloo and of NCCL, and dumps them
# as JSON (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, ``dump_json``). That form has no
# stacks, so it needs no interpreter lock, and nothing is unpickled.
#
# The page names the collective in which a rank waits; the recorder also has the earlier ones, and
# those of the script's own groups: at the first number at which ranks differ, a collective was
# skipped, or called in another order.

# Per rank: a hang is at the end. No group takes all the room: gloo's may run many more collectives.
MAX_ENTRIES, MAX_OF_GROUP = 32, 16
_SHOWN = 3
# Operations whose inputs are equal on all ranks, unlike those of scatter and all_to_all.
_ALIKE = frozenset(
    {"all_reduce", "allreduce_coalesced", "broadcast", "_all_gather_base", "_reduce_scatter_base"}
)


@dataclass(frozen=True, kw_only=True)
class FlightEntry:
    """A collective that a rank has begun."""

    group: str  # backend, name and description: numbers count within it
    sequence: int
    operation: str
    inputs: str  # "Float[3, 2]"
    is_over: bool


def parse(
    dumps: Iterable[bytes], since_ns: int, until_ns: int | None = None
) -> tuple[FlightEntry, ...]:
    """The last collectives begun since ``since_ns`` (wall clock) and before ``until_ns``, in the
    order of their beginning.

    Point-to-point messages are omitted: each pair numbers its own. Of operations that are queued
    together under one number, only the first is included. Malformed entries are omitted, too.
    """
    entries: dict[tuple[str, int], tuple[int, FlightEntry]] = {}
    for dump in dumps:
        for raw in _entries_of(dump):
            try:
                begun_ns = int(raw["time_created_ns"])
                if raw["is_p2p"] or begun_ns < since_ns:
                    continue
                if until_ns is not None and begun_ns >= until_ns:
                    continue
                entry = _entry(raw)
            except (KeyError, TypeError, ValueError):
                continue
            entries.setdefault((entry.group, entry.sequence), (begun_ns, entry))
    kept: list[FlightEntry] = []
    counts: Counter[str] = Counter()
    in_order = sorted(entries.values(), key=lambda timed: timed[0])
    for _, entry in reversed(in_order):
        counts[entry.group] += 1
        if counts[entry.group] <= MAX_OF_GROUP:
            kept.append(entry)
    return tuple(reversed(kept[:MAX_ENTRIES]))


def _entries_of(dump: bytes) -> list[dict[str, Any]]:
    try:
        entries = json.loads(dump).get("entries", [])
    except (ValueError, AttributeError):
        return []
    return entries if isinstance(entries, list) else []


def _entry(raw: Mapping[str, Any]) -> FlightEntry:
    backend, _, operation = str(raw["profiling_name"]).rpartition(":")
    name, description = raw["process_group"]
    shapes = zip(raw["input_dtypes"], raw["input_sizes"], strict=True)
    return FlightEntry(
        group=f"{backend} {name} ({description})".strip(),
        sequence=int(raw["collective_seq_id"]),
        operation=operation,
        inputs=", ".join(f"{dtype}{list(sizes)}" for dtype, sizes in shapes)[:80],
        # gloo's entries stay "scheduled", and are retired when they end.
        is_over=raw["retired"] is True or raw["state"] == "completed",
    )


def compare(flights: Mapping[int, Sequence[FlightEntry]]) -> list[str]:
    """For each group, a sentence on the first sequence number at which ranks differ."""
    groups = dict.fromkeys(entry.group for flight in flights.values() for entry in flight)
    sentences = []
    for group in groups:
        by_rank = {
            rank: {e.sequence: e for e in flight if e.group == group}
            for rank, flight in sorted(flights.items())
        }
        # A rank without entries is not a member, or has begun many others since.
        members = {rank: begun for rank, begun in by_rank.items() if begun}
        if len(members) > 1 and (sentence := _first_difference(members)):
            sentences.append(f"group {group}: {sentence}")
    return sentences


def _first_difference(members: Mapping[int, Mapping[int, FlightEntry]]) -> str:
    first = max(
        min(begun) for begun in members.values()
    )  # the first number that all ranks still have
    last = max(max(begun) for begun in members.values())
    for sequence in range(first, last + 1):
        begun = {r: entries[sequence] for r, entries in members.items() if sequence in entries}
        missing = [rank for rank in members if rank not in begun]
        calls: dict[str, list[int]] = {}
        for rank, entry in begun.items():
            calls.setdefault(_call_flight(entry), []).append(rank)
        if len(calls) > 1:
            ordered = sorted(calls.items(), key=lambda call: (len(call[1]), call[1]))
            parts = [f"{_ranks(ranks)} called {call}" for call, ranks in ordered]
            return f"number {sequence} differs: {', '.join(parts)}"
        waiting = [rank for rank, entry in begun.items() if not entry.is_over]
        if missing and waiting:
            (call,) = calls
            return (
                f"{_ranks(waiting)} in number {sequence}, {call}, which {_ranks(missing)} "
                f"{'has' if len(missing) == 1 else 'have'} not begun"
            )
        if waiting and sequence == last and len(waiting) == len(members):
            (call,) = calls
            return f"all of them are in number {sequence}, {call}"
    return ""


def _call_flight(entry: FlightEntry) -> str:
    has_same_sizes = entry.operation in _ALIKE and entry.inputs
    return f"{entry.operation} of {entry.inputs}" if has_same_sizes else entry.operation


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def describe(flights: Mapping[int, Sequence[FlightEntry]]) -> list[str]:
    """Lines for the report: where ranks differ, and the last collectives of each."""
    lines = compare(flights)
    for rank, flight in sorted(flights.items()):
        for entry in flight[-_SHOWN:]:
            state = "over" if entry.is_over else "begun"
            operation = f"{entry.operation} {entry.inputs}".rstrip()
            lines.append(
                f"  rank {rank}: {entry.group} number {entry.sequence} {operation} ({state})"
            )
    return lines


# ----------------------------------------------------------------------------
# Which rank prevents progress, and the action: a pure function of facts.
#
# ``judge(ranks, size, policy)`` evaluates the facts about every rank of a world. Its rule: ranks
# that wait in a collective are victims; the rank that is not in it is the culprit, whatever it
# does. No rank is ended on suspicion: the job waits for a rank that shows signs of life, or has
# not used up its budget, and for one without facts (its node publishes nothing as long as its
# ranks make progress).

# Prefixes of the kernel functions in which a thread sleeps, in various kernel versions.
_WAITS = (
    (("hrtimer_nanosleep", "do_nanosleep", "common_nsleep"), "it sleeps (time.sleep)"),
    (("futex",), "it waits for a lock, or for another thread (a deadlock)"),
    (("anon_pipe_read", "fifo_pipe_read", "pipe_read"), "nobody writes to the pipe that it reads"),
    (("anon_pipe_write", "fifo_pipe_write", "pipe_write"), "nobody reads the pipe it writes to"),
    (("wait_for_partner", "fifo_open"), "nobody has opened the other end of a named pipe"),
    (("request_wait_answer", "fuse_"), "a FUSE file system does not answer"),
    (("n_tty_read", "tty_read"), "it waits for input from a terminal"),
    (("wait_woken",), "it waits for input from a terminal or a socket"),
    (("do_wait", "kernel_wait4"), "it waits for a child process to end"),
    (
        ("locks_lock_inode_wait", "flock_lock", "posix_lock", "fcntl_setlk", "do_lock_file_wait"),
        "another process holds the lock of a file",
    ),
    (
        ("do_poll", "do_sys_poll", "do_select", "poll_schedule", "ep_poll", "do_epoll"),
        "it waits for a socket, a pipe, a terminal or another process (poll)",
    ),
    (
        ("unix_", "sk_", "__skb_wait", "tcp_", "inet_"),
        "the other end of a socket does not answer",
    ),
)
_UNKNOWN_WAIT = "a deadlock, or it waits for something outside of the job"


class HangAction(str, Enum):
    """The action that follows from a verdict."""

    WAIT = "wait"
    KILL = "kill"  # the culprit; the others recover as from a death
    ABORT_AND_REFORM = "abort-and-reform"  # no process is ended: the same ranks form another world
    LEAVE_ALONE = "leave-alone"  # it is being debugged


class HangKind(str, Enum):
    """The kind of a hang."""

    NONE = "none"
    STOPPED = "stopped"
    DEBUGGED = "debugged"
    ABSENT = "absent"  # not in the collective that the others wait in
    MISMATCH = "mismatch"  # ranks wait in different collectives
    LOST_MESSAGE = "lost-message"  # all wait in the same one


class Confidence(str, Enum):
    """The confidence of a verdict."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True, kw_only=True)
class Judgment:
    """``reason`` is a sentence for users, the same for the same hang: it contains no duration."""

    action: HangAction
    kind: HangKind
    culprits: tuple[int, ...]  # ranks
    culprit: RankFacts | None = None  # the first of them is the one acted upon
    confidence: Confidence
    reason: str


def judge(ranks: Sequence[RankFacts], size: int, policy: BudgetPolicy) -> Judgment:
    """The verdict on a world of ``size`` ranks, of which these are known to make no progress."""
    if debugged := [r for r in ranks if r.is_traced]:
        return _leave_alone(debugged)
    unknown = size - len({r.rank for r in ranks})
    summary = _Summary.of(ranks)
    waiting: list[RankFacts] = []
    working: list[RankFacts] = []
    for r in ranks:
        (waiting if _is_waiting(r, summary, unknown) else working).append(r)
    if not any(r.quiet_s >= suspicion_s(r, policy) for r in waiting):
        return _wait("no rank has waited for long")
    if over := [r for r in working if r.quiet_s >= budget_s(r, policy)]:
        return _kill(over, waiting)
    if unknown:
        return _wait(f"{unknown} of {size} ranks may be making progress")
    if working:
        slow = working[0]
        return _wait(f"{slow.name} is in {slow.phase.label}, within its budget")
    return _all_wait(waiting, policy)


def judge_stopped(facts: RankFacts, stopped_s: float, grace_s: float) -> Judgment:
    """The verdict on a worker in state T (SIGSTOP, SIGTSTP), by its own agent."""
    if facts.is_traced:
        return _leave_alone([facts])
    if facts.kernel.state != "T" or stopped_s < grace_s:
        return _wait(f"{facts.name} has not been stopped for long")
    return Judgment(
        action=HangAction.KILL,
        kind=HangKind.STOPPED,
        culprits=(facts.rank,),
        culprit=facts,
        confidence=Confidence.HIGH,
        reason=f"{facts.name} is stopped: its process is in state T (SIGSTOP)",
    )


@dataclass(frozen=True)
class _Summary:
    """What the decision about a rank needs to know of all others: comparing each with every other
    one took 20 s for eight thousand ranks, on the thread that renews permissions."""

    newest: int  # generation
    in_collective: frozenset[int]  # generations in which a rank waits in a collective
    outside: frozenset[int]  # generations in which a rank is not in a collective
    first_collective: dict[int, int]  # by generation: the lowest number that a rank has begun
    last_on_device: int | None  # the highest number in which a rank visibly waits for a device

    @classmethod
    def of(cls, ranks: Sequence[RankFacts]) -> _Summary:
        first: dict[int, int] = {}
        for r in ranks:
            first[r.generation] = min(r.collective, first.get(r.generation, r.collective))
        waiting = [r for r in ranks if r.phase is Phase.COLLECTIVE]
        return cls(
            newest=max((r.generation for r in ranks), default=0),
            in_collective=frozenset(r.generation for r in waiting),
            outside=frozenset(r.generation for r in ranks if r.phase is not Phase.COLLECTIVE),
            first_collective=first,
            # A collective of the host does not wait for what others have queued on their devices.
            last_on_device=max(
                (r.collective for r in waiting if not r.flags & Flag.ON_HOST), default=None
            ),
        )

    def is_ahead(self, facts: RankFacts) -> bool:
        """Whether another rank of its world has not begun its last collective."""
        return self.first_collective[facts.generation] < facts.collective


def _is_waiting(facts: RankFacts, ranks: _Summary, unknown: int) -> bool:
    """Whether a rank waits for others. While a world forms, ranks also wait for each other outside
    of collectives, until the first is in one. From then on, the others transfer their state."""
    if facts.phase is Phase.FORMING:
        return facts.generation not in ranks.in_collective
    if facts.generation != ranks.newest:
        return _is_waiting_in_former_world(facts, ranks, unknown)
    return facts.phase is Phase.COLLECTIVE or _may_wait_for_device(facts, ranks)


def _is_waiting_in_former_world(facts: RankFacts, ranks: _Summary, unknown: int) -> bool:
    """Whether a rank waits in a world that a joining node has already left for the next one. A
    collective waits for ranks of its world that may still enter it. Without such ranks it has
    ended: a rank that is still in it was not released, and delays the others."""
    if facts.phase is Phase.COLLECTIVE:
        return unknown > 0 or facts.generation in ranks.outside
    is_on_stream = bool(facts.flags & Flag.ON_STREAM) and facts.phase is not Phase.DATA
    return is_on_stream and ranks.is_ahead(facts)


def _may_wait_for_device(facts: RankFacts, ranks: _Summary) -> bool:
    """Whether a rank may wait for collectives queued on a device, as in ``loss.item()``. It waits
    for others if it has queued as many collectives as any waiting rank, or one that another rank
    has not begun (``dist.all_reduce(t)`` is queued, and returns)."""
    if not facts.flags & Flag.ON_STREAM or facts.phase is Phase.DATA:
        return False
    if ranks.is_ahead(facts):
        return True
    return ranks.last_on_device is not None and facts.collective >= ranks.last_on_device


def _wait(reason: str) -> Judgment:
    return Judgment(
        action=HangAction.WAIT,
        kind=HangKind.NONE,
        culprits=(),
        confidence=Confidence.HIGH,
        reason=reason,
    )


def _leave_alone(debugged: Sequence[RankFacts]) -> Judgment:
    first = min(debugged, key=lambda r: r.rank)
    by = (
        f"process {first.kernel.tracer_pid} traces it"
        if first.kernel.tracer_pid
        else "it is at a debugger's prompt"
    )
    return Judgment(
        action=HangAction.LEAVE_ALONE,
        kind=HangKind.DEBUGGED,
        culprits=tuple(sorted(r.rank for r in debugged)),
        culprit=first,
        confidence=Confidence.HIGH,
        reason=f"{first.name} is being debugged ({by}): the job waits for it",
    )


def _kill(over: Sequence[RankFacts], waiting: Sequence[RankFacts]) -> Judgment:
    # One at a time, the furthest behind first: another one may be waiting for it, unnoticed.
    culprit = min(over, key=lambda r: (r.generation, r.step, r.collective, -r.quiet_s, r.rank))
    where = f" of step {culprit.step}" if _is_in_step(culprit.phase) else ""
    victims = _where_they_wait(waiting)
    return Judgment(
        action=HangAction.KILL,
        kind=HangKind.ABSENT,
        culprits=(culprit.rank,),
        culprit=culprit,
        confidence=Confidence.HIGH if len(over) == 1 else Confidence.MEDIUM,
        reason=f"{culprit.name} hangs in {culprit.phase.label}{where}, {_why(culprit)}, "
        f"while {victims}",
    )


def _is_in_step(phase: Phase) -> bool:
    return phase in (Phase.DATA, Phase.COMPUTE, Phase.COLLECTIVE, Phase.OPTIMIZER)


def _where_they_wait(waiting: Sequence[RankFacts]) -> str:
    shown = max(waiting, key=lambda r: (r.generation, r.quiet_s))
    count = len(waiting)
    who = f"rank {shown.rank} waits" if count == 1 else f"{count} ranks wait"
    if shown.phase is Phase.FORMING:
        return f"{who} for it in the next world"
    # Without its number, which differs when the same step is repeated.
    return f"{who} in {shown.operation or 'a collective'}"


def _call_verdict(facts: RankFacts) -> str:
    return f"{facts.operation or 'a collective'} number {facts.collective}"


def _why(facts: RankFacts) -> str:
    """What the rank does instead, according to the kernel."""
    kernel = facts.kernel
    at = f" in {kernel.wait_channel}" if kernel.wait_channel else ""
    if kernel.state == "D" or kernel.file_system:
        return describe_wait(facts)
    if facts.phase is Phase.COLLECTIVE:
        return f"in {_call_verdict(facts)} of generation {facts.generation}, which is over"
    if kernel.cpu_share > IDLE_SHARE:
        return _what_computes(kernel)
    on = f" on {kernel.call_target}" if kernel.call_target else ""
    if facts.phase is Phase.DATA and kernel.data_workers:
        return f"asleep{at}{on}: its data loader returns no batch ({_of_data_workers(kernel)})"
    return f"asleep{at}{on}: {_what_it_waits_for(kernel.wait_channel)}"


def describe_wait(facts: RankFacts) -> str:
    """What a process waits for that is blocked in the kernel."""
    kernel = facts.kernel
    at = f" in {kernel.wait_channel}" if kernel.wait_channel else ""
    what = kernel.file_system or "a file system or device"
    return f"blocked in the kernel{at}: {what} does not answer"


def _of_data_workers(kernel: KernelFacts) -> str:
    waits = f", {kernel.data_worker_waits}" if kernel.data_worker_waits else ""
    hint = ": perhaps a lock that was held when they were forked" if "futex" in waits else ""
    return f"data workers in state {kernel.data_workers}{waits}{hint}"


def _what_computes(kernel: KernelFacts) -> str:
    if kernel.state == "S" and kernel.wait_channel.startswith("futex"):
        return (
            "waiting for another of its threads, which uses CPU and holds the interpreter lock or "
            "another lock, or computes for very long"
        )
    return "using CPU: an endless loop, or a computation that takes very long"


def _what_it_waits_for(channel: str) -> str:
    return next((text for names, text in _WAITS if channel.startswith(names)), _UNKNOWN_WAIT)


def _all_wait(waiting: Sequence[RankFacts], policy: BudgetPolicy) -> Judgment:
    if any(r.phase is Phase.FORMING for r in waiting):
        return _wait("the world is being changed")  # the building of a group has its own timeout
    # The last to arrive determines how long all have been waiting.
    quiet_s = min(r.quiet_s for r in waiting)
    calls = Counter(r.call for r in waiting)
    # Ranks of different subgroups are in different collectives. So are ranks of which only some
    # visibly wait for a device.
    is_distinguishable = all(
        r.phase is Phase.COLLECTIVE and not r.flags & Flag.SUBGROUPS for r in waiting
    )
    if len(calls) == 1 or not is_distinguishable:
        if quiet_s < max(lost_message_s(r, policy) for r in waiting):
            return _wait("all ranks wait in the same collective, which may be a long one")
        return Judgment(
            action=HangAction.ABORT_AND_REFORM,
            kind=HangKind.LOST_MESSAGE,
            culprits=(),
            confidence=Confidence.MEDIUM,
            reason=f"all {len(waiting)} ranks wait in {_call_verdict(waiting[0])} of step "
            f"{waiting[0].step}: a message was lost, or a connection is broken in one direction",
        )
    if quiet_s < max(mismatch_s(r, policy) for r in waiting):
        return _wait("ranks wait in different collectives, which may be temporary")
    return _mismatch(waiting, calls)


def _mismatch(waiting: Sequence[RankFacts], calls: Counter[tuple[int, int, int, str]]) -> Judgment:
    (most, votes), *others = calls.most_common()
    has_majority = votes > max(count for _, count in others)
    if has_majority:
        out_of_order = [r for r in waiting if r.call != most]
    else:  # no majority: the rank that is ahead has skipped something
        ahead = max(r.call for r in waiting)
        out_of_order = [r for r in waiting if r.call == ahead]
    culprit = min(out_of_order, key=lambda r: r.rank)
    other = next(r for r in waiting if r.call != culprit.call)
    if has_majority:
        other = next(r for r in waiting if r.call == most)
    return Judgment(
        action=HangAction.ABORT_AND_REFORM,
        kind=HangKind.MISMATCH,
        culprits=tuple(sorted(r.rank for r in out_of_order)),
        confidence=Confidence.HIGH if has_majority else Confidence.LOW,
        reason=f"{culprit.name} waits in {_place(culprit)} and rank {other.rank} in "
        f"{_place(other)}: a collective was skipped, or called in another order",
    )


def _place(facts: RankFacts) -> str:
    return f"{_call_verdict(facts)} of step {facts.step} (called in {facts.outer.label})"
