"""torch's flight recorder: parsing of its dumps, and differences between ranks."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.manual_clock import ManualClock
from torch.distributed import HashStore  # type: ignore[attr-defined]

from elastic import torch_private
from elastic.errors import SYSTEM_CLOCK
from elastic.hangs.verdict import MAX_ENTRIES, MAX_OF_GROUP, FlightEntry, compare, describe, parse
from elastic.link.link import FlightTrace, decode, encode
from elastic.testing.waiting import eventually
from elastic.worker.worlds import FlightRecorder

BEGAN_NS = 1_795_403_266_000_000_000
GROUP = "gloo 0 (default_pg)"


def raw(sequence: int, operation: str = "gloo:all_reduce", **changes: Any) -> dict[str, Any]:
    """An entry as torch 2.13 writes it (FlightRecorderDetail.hpp, dump_json)."""
    sizes = [] if operation.endswith("barrier") else [[3, 2]]
    return {
        "collective_seq_id": sequence,
        "input_dtypes": ["Float"] * len(sizes),
        "input_sizes": sizes,
        "is_p2p": False,
        "op_id": sequence,
        "output_dtypes": ["Float"] * len(sizes),
        "output_sizes": sizes,
        "p2p_seq_id": 0,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": operation,
        "record_id": sequence - 1,
        "retired": True,
        "state": "scheduled",
        "thread_id": "140173214366592",
        "thread_name": "python",
        "time_created_ns": BEGAN_NS + sequence,
        "time_discovered_completed_ns": 0,
        "time_discovered_started_ns": 0,
        "timeout_ms": 1800000,
        **changes,
    }


def dump(*entries: dict[str, Any]) -> bytes:
    document = {
        "comm_lib_version": "",
        "entries": list(entries),
        "nccl_comm_state": {},
        "pg_config": {"": {"desc": "", "name": "", "ranks": "[]"}},
        "pg_status": {"0": {"last_completed_collective": "5", "last_enqueued_collective": "7"}},
        "version": "2.10",
    }
    if not entries:
        del document["entries"]
    return json.dumps(document).encode()


def flight(*entries: dict[str, Any]) -> tuple[FlightEntry, ...]:
    return parse([dump(*entries)], BEGAN_NS)


def test_entries_are_read_as_torch_writes_them() -> None:
    assert flight(raw(7), raw(8, "gloo:barrier", retired=False)) == (
        FlightEntry(
            group=GROUP, sequence=7, operation="all_reduce", inputs="Float[3, 2]", is_over=True
        ),
        FlightEntry(group=GROUP, sequence=8, operation="barrier", inputs="", is_over=False),
    )


def test_nccl_entries_are_over_when_completed_or_retired() -> None:
    parsed = flight(
        raw(1, "nccl:all_reduce", state="completed", retired=False, duration_ms=0.3),
        raw(2, "nccl:all_reduce", state="started", retired=False),
    )
    assert [(e.group, e.is_over) for e in parsed] == [
        ("nccl 0 (default_pg)", True),
        ("nccl 0 (default_pg)", False),
    ]


def test_p2p_entries_and_entries_of_earlier_worlds_are_ignored() -> None:
    parsed = flight(raw(1, time_created_ns=BEGAN_NS - 1), raw(2, is_p2p=True), raw(3))
    assert [e.sequence for e in parsed] == [3]


def test_entries_of_a_later_world_are_ignored() -> None:
    parsed = parse([dump(raw(1), raw(2), raw(3))], BEGAN_NS, until_ns=BEGAN_NS + 3)
    assert [e.sequence for e in parsed] == [1, 2]


def test_coalesced_operations_share_a_number_unlike_two_backends() -> None:
    """NCCL's recorder and gloo's, of a group with both."""
    coalesced = [raw(1, "nccl:_all_gather_base", op_id=n) for n in (1, 2)]
    parsed = parse([dump(*coalesced), dump(raw(1)), dump(raw(1))], BEGAN_NS)
    assert [(e.group, e.sequence) for e in parsed] == [("nccl 0 (default_pg)", 1), (GROUP, 1)]


def test_only_the_last_entries_are_kept() -> None:
    parsed = flight(*(raw(n) for n in range(1, 3 * MAX_ENTRIES)))
    assert (len(parsed), parsed[-1].sequence) == (MAX_OF_GROUP, 3 * MAX_ENTRIES - 1)


def test_one_group_does_not_displace_another() -> None:
    """gloo's small collectives and NCCL's gradients, each with its own recorder."""
    of_gloo = dump(*(raw(n) for n in range(1, 3 * MAX_ENTRIES)))
    of_nccl = dump(*(raw(n, "nccl:all_reduce") for n in range(1, 6)))
    for dumps in ([of_nccl, of_gloo], [of_gloo, of_nccl]):
        parsed = parse(dumps, BEGAN_NS)
        assert [e.sequence for e in parsed if e.group.startswith("nccl")] == [1, 2, 3, 4, 5]
        assert len(parsed) == MAX_OF_GROUP + 5
    groups = [raw(n, process_group=[str(g), ""]) for g in range(9) for n in range(1, 20)]
    assert len(parse([dump(*groups)], BEGAN_NS)) == MAX_ENTRIES


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"\x80\x04]",  # a pickle
        b"[]",
        b'{"entries": 3}',
        b'{"entries": [3, {}, {"is_p2p": false}]}',
        dump(raw(1, process_group="0"), raw(2, input_sizes=[3]), raw(3, time_created_ns="now")),
        dump(),
    ],
)
def test_malformed_entries_are_ignored(nonsense: bytes) -> None:
    assert parse([nonsense], BEGAN_NS) == ()


def test_a_rank_that_has_not_begun_the_current_collective_is_named() -> None:
    waits = flight(raw(5), raw(6, retired=False))
    assert compare({0: waits, 1: flight(raw(4), raw(5)), 2: waits}) == [
        f"group {GROUP}: ranks 0, 2 in number 6, all_reduce of Float[3, 2], which rank 1 has not "
        "begun"
    ]


def test_the_first_number_at_which_ranks_differ_is_reported() -> None:
    """Rank 1 skipped a barrier, so that its next call has the barrier's number."""
    waits = flight(raw(5), raw(6, "gloo:barrier"), raw(7, retired=False))
    skipped = flight(raw(5), raw(6, retired=False))
    assert compare({0: waits, 1: skipped, 2: waits}) == [
        f"group {GROUP}: number 6 differs: rank 1 called all_reduce of Float[3, 2], ranks 0, 2 "
        "called barrier"
    ]


def test_different_sizes_are_reported_where_they_must_be_equal() -> None:
    one, other = raw(5, retired=False), raw(5, retired=False, input_sizes=[[4, 2]])
    assert "number 5 differs" in compare({0: flight(one), 1: flight(other)})[0]
    for entry in (one, other):
        entry["profiling_name"] = "gloo:alltoall_base"
    assert "all of them are in number 5" in compare({0: flight(one), 1: flight(other)})[0]


def test_entries_recorded_by_some_ranks_only_are_not_compared() -> None:
    """The recorder's buffer is a ring, and rank 1 has not joined rank 0's subgroup."""
    of_subgroup = raw(1, process_group=["1", "mesh_tp"], retired=False)
    one = flight(raw(1, "gloo:barrier"), raw(2), raw(3), of_subgroup)
    assert compare({0: one, 1: flight(raw(2), raw(3))}) == []


def test_a_broadcast_that_its_source_has_left_is_not_a_hang() -> None:
    assert compare({0: flight(raw(1), raw(2)), 1: flight(raw(1))}) == []


def test_the_report_shows_the_last_entries_of_each_rank() -> None:
    lines = describe({1: flight(raw(1), raw(2), raw(3), raw(4)), 0: flight(raw(4, retired=False))})
    assert "number 4 differs" not in lines[0]
    assert [line for line in lines if "rank 1:" in line] == [
        f"  rank 1: {GROUP} number {n} all_reduce Float[3, 2] (over)" for n in (2, 3, 4)
    ]
    assert f"  rank 0: {GROUP} number 4 all_reduce Float[3, 2] (begun)" in lines


def test_a_full_trace_fits_into_a_message() -> None:
    long = tuple(
        FlightEntry(
            group="g" * 60, sequence=10**9, operation="o" * 40, inputs="i" * 80, is_over=True
        )
        for _ in range(MAX_ENTRIES)
    )
    trace = FlightTrace(generation=3, entries=long)
    assert decode(encode(trace)) == trace


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_the_installed_torch_records_is_sent_to_the_agent(alone: None) -> None:
    sent: list[FlightTrace] = []
    recorder = FlightRecorder(sent.append)
    dist.all_reduce(torch.ones(3, 2))
    before = len(parse(torch_private.flight_recorder_dumps(), 0))
    recorder.enter_generation(7)
    dist.all_reduce(torch.ones(5))
    dist.barrier()
    recorder.dump()
    (trace,) = eventually(lambda: sent, "the trace")
    recorder.close()
    assert before >= 1
    assert trace.generation == 7
    assert [(e.operation, e.inputs) for e in trace.entries] == [
        ("all_reduce", "Float[5]"),
        ("barrier", ""),
    ]


def test_a_dump_that_hangs_does_not_block_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may not answer: a repeated dump starts no second thread, and close does not wait."""
    released, asked = threading.Event(), []

    def hang() -> tuple[bytes, ...]:
        asked.append(1)
        released.wait()
        return ()

    monkeypatch.setattr(torch_private, "flight_recorder_dumps", hang)
    sent: list[FlightTrace] = []
    recorder = FlightRecorder(sent.append, ManualClock())
    recorder.dump()
    recorder.dump()
    began_s = SYSTEM_CLOCK.monotonic()
    recorder.close()
    assert SYSTEM_CLOCK.monotonic() - began_s < 60
    assert (asked, sent) == ([1], [])
    released.set()
    recorder.close()
    assert sent == [FlightTrace(generation=0, entries=())]
