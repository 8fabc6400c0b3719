"""torch's flight recorder: the recent collectives of each rank, and where ranks differ.

Pure. torch keeps the last 2000 collectives of each process, of gloo and of NCCL, and dumps them as
JSON (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, ``dump_json``). That form has no stacks,
so it needs no interpreter lock, and nothing is unpickled.

The page names the collective in which a rank waits; the recorder also has the earlier ones, and
those of the script's own groups: at the first number at which ranks differ, a collective was
skipped, or called in another order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
            calls.setdefault(_call(entry), []).append(rank)
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


def _call(entry: FlightEntry) -> str:
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
