"""The stacks of all ranks in a hang report, whose size is bounded for any world size."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from kit.hang_watches import hang_response, hang_watch
from kit.journal import MemoryJournal
from kit.membership_nodes import node, world
from kit.memory_store import MemoryStore
from rank_facts import rank_facts

from elastic.agent.hangs import Hangs, StacksTaken
from elastic.agent.node import NodeContext, NodeStatus, RunSecret
from elastic.errors import SYSTEM_CLOCK
from elastic.hangs import stacks
from elastic.hangs.page import StackGroup
from elastic.hangs.report import (
    MAX_CHARACTERS,
    HangReport,
    Judged,
    ReportFolder,
    Share,
    render,
)
from elastic.hangs.verdict import Confidence, FlightEntry, HangAction, HangKind, Judgment
from elastic.hangs.watch import Supervised
from elastic.membership.records import (
    HangStacks,
    HangVerdict,
    Keys,
    NodeState,
    RankFlight,
    decode,
    encode,
)
from elastic.store.keyvalue import Entry
from elastic.testing.waiting import eventually
from elastic.tuning.options import AgentOptions
from elastic.wire.handshake import SecretKey

NODES, PER_NODE = 64, 8
KEYS = Keys.of("/elastic", "job")


RANKS = range(NODES * PER_NODE)
CULPRIT = 301
FRAMES = 40
ETCD_REQUEST_BYTES = 1_500_000  # its --max-request-bytes, by default


def dump(place: str, frames: int = FRAMES) -> str:
    """As faulthandler writes it: data threads, and the main thread at ``place``."""
    folder = "/usr/lib/python3/site-packages/torch/nn/parallel"
    outer = "\n".join(f'  File "{folder}/module{n}.py", line {n} in call{n}' for n in range(frames))
    main = f"Current thread 0x1 (most recent call first):\n{place}\n{outer}"
    other = (
        f'Thread 0x2 (most recent call first):\n  File "{folder}/pin.py", line 1 in loop\n{outer}'
    )
    return f"{other}\n\n{main}"


WAITS = dump('  File "ddp.py", line 1 in wait')
LOOPS = dump('  File "train.py", line 9 in loss')


def sent_by(number: int, share: Share) -> tuple[StackGroup, ...]:
    """What a node of the world sends for its ranks."""
    ranks = range(number * PER_NODE, (number + 1) * PER_NODE)
    taken = stacks.group((rank, LOOPS if rank == CULPRIT else WAITS) for rank in ranks)
    return stacks.within(taken, share.characters)


def test_stacks_of_64_nodes_form_two_groups_with_the_culprit_first() -> None:
    share = Share.of(NODES, len(RANKS))
    sent = [sent_by(number, share) for number in range(NODES)]
    assert [len(groups) for groups in sent] == [
        2 if number == CULPRIT // PER_NODE else 1 for number in range(NODES)
    ], "a node sends each distinct stack once"
    culprit, others = stacks.merge(group for groups in sent for group in groups)
    assert (culprit.ranks, len(others.ranks)) == ((CULPRIT,), len(RANKS) - 1)
    assert 'File "train.py", line 9 in loss' in culprit.text
    assert sorted(culprit.ranks + others.ranks) == list(RANKS)


def test_the_size_of_sent_stacks_is_bounded_for_any_world_size() -> None:
    """The worst case: every rank of every node is at a different place."""
    flight = FlightEntry(
        group="nccl 0 (default_pg)", sequence=1, operation="all_reduce", inputs="x", is_over=False
    )
    everything: list[StackGroup] = []
    for nodes in (2, 8, NODES):
        share, total = Share.of(nodes, nodes * PER_NODE), 0
        for number in range(nodes):
            ranks = range(number * PER_NODE, (number + 1) * PER_NODE)
            own = stacks.group((r, dump(f'  File "a.py", line {r} in f{r}', 100)) for r in ranks)
            own = stacks.within(own, share.characters)
            assert sorted(r for one in own for r in one.ranks) == list(ranks)
            assert all(f"line {one.ranks[0]} in f{one.ranks[0]}" in one.text for one in own)
            flights = (flight,) * share.flight_entries
            record = HangStacks(
                node_id="n",
                generation=1,
                stacks=own,
                flights=tuple(RankFlight(rank=r, entries=flights) for r in ranks),
            )
            assert len(encode(record)) < ETCD_REQUEST_BYTES / 10
            assert decode(HangStacks, "key", encode(record)) == record
            total += sum(len(one.text) for one in own)
            everything += own if nodes == NODES else ()
        assert total <= MAX_CHARACTERS
    merged = stacks.within(stacks.merge(everything), MAX_CHARACTERS)
    assert len(merged) == len(RANKS)


def test_a_truncated_stack_is_grouped_with_its_complete_stack() -> None:
    cut = stacks.shortened(WAITS, 600)
    assert len(cut) <= 600 and cut.endswith("  ...") and "line 1 in wait" in cut
    groups = stacks.merge([StackGroup((4,), cut), StackGroup((1, 2), WAITS)])
    assert groups == (StackGroup((1, 2, 4), WAITS),)
    assert stacks.shortened(WAITS, 10**6) == WAITS
    assert "in loop" not in stacks.shortened(WAITS, len(WAITS) - 1), "other threads are cut first"


def test_native_stacks_at_different_places_form_separate_groups() -> None:
    """py-spy's format differs from faulthandler's, and starts with the main thread."""

    def dumped(function: str) -> str:
        main = (
            f'Thread 7 (active): "MainThread"\n    {function} (train.py:3)\n    <module> (t.py:9)'
        )
        return f'Process 7: python\n\n{main}\n\nThread 8 (idle): "pin"\n    wait (pin.py:1)'

    taken = {rank: stacks._main_last(dumped("wait" if rank else "loop")) for rank in range(3)}
    assert [one.ranks for one in stacks.group(taken.items())] == [(0,), (1, 2)]
    assert stacks.main_first(taken[0]).startswith('Thread 7 (active): "MainThread"')


def test_ranks_are_grouped_independently_of_lines_in_libraries() -> None:
    library = "/usr/lib/python3.11/threading.py"
    polls = dump(f'  File "{library}", line 327 in wait\n  File "{library}", line 629 in join')
    joins = dump(f'  File "{library}", line 1096 in join')
    assert [one.ranks for one in stacks.group([(0, polls), (1, joins), (2, polls)])] == [(0, 1, 2)]
    other = dump(f'  File "{library}", line 1096 in notify')
    assert [one.ranks for one in stacks.group([(0, polls), (1, other), (2, polls)])] == [
        (1,),
        (0, 2),
    ]
    line_9, line_10 = (dump(f'  File "/job/train.py", line {n} in loss') for n in (9, 10))
    assert len(stacks.group([(0, line_9), (1, line_10)])) == 2, "lines of the script count"


def test_culprits_are_listed_first_in_a_separate_group() -> None:
    """Also if they are the majority, or at the same place as the others."""
    taken = [(rank, WAITS) for rank in range(4)]
    assert [one.ranks for one in stacks.group(taken, apart=(0, 1, 3))] == [(0, 1, 3), (2,)]
    sent = [StackGroup((0, 1), WAITS), StackGroup((2, 3), WAITS)]
    assert [one.ranks for one in stacks.merge(sent, apart=(3,))] == [(3,), (0, 1, 2)]


def test_the_place_in_the_script_is_its_innermost_script_frame() -> None:
    own = Path(stacks.__file__).parents[1] / "worker" / "worlds.py"
    inner = f'  File "{own}", line 3 in wait\n  File "/usr/lib/python3.11/x.py", line 4 in call'
    text = dump(f'{inner}\n  File "/job/train.py", line 41 in load\n  File "m.py", line 5 in main')
    assert stacks.script_frame(text) == ("load (/job/train.py:41)", "load (train.py)")
    assert stacks.script_frame(dump(inner)) == stacks.script_frame("") == ("", "")


# ── from node to node ──────────────────────────────────────────────────────────────────────


def verdict_of_a_large_world() -> HangVerdict:
    ranks = tuple(rank_facts(n, node=f"n{n + 1}", quiet_s=9.0) for n in range(NODES))
    return HangVerdict(
        generation=7,
        action=HangAction.KILL,
        kind=HangKind.ABSENT,
        confidence=Confidence.HIGH,
        reason="rank 0 on n1 hangs",
        culprits=(0,),
        culprit=ranks[0],
        node_id="id-n1",
        ranks=ranks,
        size=NODES,
    )


def taken_of(context: NodeContext) -> StacksTaken | None:
    """The request for stacks, if the node's thread has received one."""
    return next((m for m in context.inbox.take(1.0) if isinstance(m, StacksTaken)), None)


@pytest.mark.parametrize("name", ["n2", "n64", "n9"])
def test_every_node_of_a_large_world_sends_the_stacks_of_its_ranks(name: str) -> None:
    members = replace(world(*(f"n{n + 1}" for n in range(NODES))), generation=7)
    record = node(name, NodeState.READY, in_process=True, running=members)
    store = MemoryStore()
    context = NodeContext(
        store=store,
        keys=KEYS,
        secret=RunSecret(SecretKey.generate(), KEYS.root),
        options=AgentOptions(),
        status=NodeStatus(record, KEYS, 0.0),
        clock=SYSTEM_CLOCK,
        journal=MemoryJournal(),
    )
    hangs = Hangs(context)
    lease = store.lease(60)
    with contextlib.closing(lease), contextlib.closing(hangs.watch):
        hangs.watch.start()
        hangs.watch.supervise((Supervised(os.getpid(), 0, ""),))
        hangs.watch_world(members)
        hangs.on_verdict(Entry(KEYS.hang_verdict, encode(verdict_of_a_large_world()), 1, 1))
        taken = eventually(lambda: taken_of(context), "the stacks of this node")
        hangs.on_stacks_taken(taken)
        hangs.publish(lease)
        entry = store.get(KEYS.hang_stack(f"id-{name}"))
    assert entry is not None
    sent = decode(HangStacks, entry.key, entry.value)
    assert [one.ranks for one in sent.stacks] == [(int(name[1:]) - 1,)]


def test_the_stacks_of_64_nodes_are_in_the_report_and_its_json(tmp_path: Path) -> None:
    """Written once for all stacks that have arrived, not once per node."""
    record = verdict_of_a_large_world()
    writes: list[HangReport] = []

    class Folder(ReportFolder):
        def write(self, path: Path, report: HangReport) -> str:
            writes.append(report)
            return super().write(path, report)

    response = hang_response(Folder(str(tmp_path)), acts=False)
    watch = hang_watch()
    watch.enter_world(7, 0)
    verdict = Judgment(
        action=HangAction.ABORT_AND_REFORM,
        kind=record.kind,
        culprits=record.culprits,
        culprit=record.culprit,
        confidence=record.confidence,
        reason=record.reason,
    )
    judged = Judged(verdict=verdict, generation=7, size=len(RANKS), ranks=record.ranks)
    response.carry_out(watch, judged)
    share = Share.of(NODES, len(RANKS))
    for number in range(NODES):
        response.add_stacks(watch, 7, sent_by(number, share), {})
    response.add_stacks(watch, 6, (StackGroup((0,), LOOPS),), {})  # of another hang
    watch.run_tasks()
    assert len(writes) == 2, "the report itself, and once more with all stacks"
    text = render(writes[-1])
    (named,) = record.culprits
    places = [
        text.index(f"\nrank {named}:\n"),
        text.index(f"\nrank {CULPRIT}:\n"),
        text.index(f"\nranks 1-{CULPRIT - 1}, {CULPRIT + 1}-{len(RANKS) - 1} (510 ranks):"),
    ]
    assert places == sorted(places)
    (said,) = tmp_path.glob("*.json")
    groups = json.loads(said.read_text())["stacks"]
    assert [len(group["ranks"]) for group in groups] == [1, 1, len(RANKS) - 2]


def test_collectives_that_arrive_after_the_verdict_are_in_the_report(tmp_path: Path) -> None:
    """A busy worker answers late. The other worker's were known."""
    watch = hang_watch()
    late: list[tuple[int, tuple[FlightEntry, ...]]] = []
    known, slow = os.getpid(), os.getppid()
    entry = FlightEntry(group="gloo 0", sequence=4, operation="barrier", inputs="", is_over=False)
    watch.enter_world(7, 0)
    watch.supervise((Supervised(known, 0, ""), Supervised(slow, 1, "")))
    watch.learn_flight(known, 7, (entry,))
    watch.learn_flight(slow, 6, (entry,))  # of an earlier world
    watch.run_tasks()
    flights = watch.flights_of(7, lambda rank, flight: late.append((rank, flight)))
    assert flights == {0: (entry,)}
    watch.enter_world(8, 4)  # with other ranks
    watch.learn_flight(slow, 7, (entry,))
    watch.learn_flight(slow, 7, ())  # once
    watch.run_tasks()
    assert late == [(1, (entry,))]
