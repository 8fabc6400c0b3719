"""Records survive a round trip through the store; invalid values are rejected with their key."""

from __future__ import annotations

import json
import os
import string
import zlib
from dataclasses import fields, is_dataclass, replace
from random import Random
from typing import Any, cast, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent.accounting import REMEMBERED, remembered, to_record
from elastic.agent.roster import Failed
from elastic.errors import ConfigError, RecordError
from elastic.membership.budget import Breakage
from elastic.membership.progress import (
    MAX_REASON_CHARS,
    MAX_WAITING,
    JobProgress,
    RecordedHeartbeat,
    WaitingNode,
    encode_progress,
)
from elastic.membership.records import (
    COMPRESSED_FROM_BYTES,
    MAX_RECORD_BYTES,
    RECORD_VERSION,
    BreakageRecord,
    Done,
    FailureReport,
    Keys,
    Leader,
    Member,
    Node,
    Outcome,
    ProcessIdentity,
    Record,
    ReplicaSlots,
    Secret,
    WorldRecord,
    decode,
    encode,
)
from elastic.wire.messages import MemoryLocation, NodeReplica, ReplicaSlot, WorldReference

KEY = "/elastic/job/world"

texts = st.text(max_size=12)
integers = st.integers(-(10**18), 10**18)
numbers = st.floats(allow_nan=False, allow_infinity=False)
limits = st.tuples(st.integers(1, 9), st.integers(0, 9)).map(lambda t: (t[0], t[0] + t[1]))
# Narrows the values that a type allows to those that are valid in a record.
meanings: dict[str, st.SearchStrategy[Any]] = {
    "nproc": st.integers(1, 16),
    "replica_size": st.integers(1, 64),
    "left_in_order": st.booleans(),
    "generation": st.integers(1, 1 << 62),
    "max_ranks": st.integers(0, 1 << 40),
    "memory_port": st.integers(0, 65535),
    "replica_port": st.integers(0, 65535),
    "ports": st.lists(st.integers(0, 65535), min_size=1, max_size=3).map(tuple),
    "version": st.just(RECORD_VERSION),
}


def records(cls: type[Any]) -> st.SearchStrategy[Any]:
    """All valid records of a class."""
    hints = get_type_hints(cls)
    drawn = {f.name: _of(f.name, hints[f.name]) for f in fields(cls)}
    if "min_nodes" not in drawn:
        return st.builds(cls, **drawn)
    del drawn["min_nodes"], drawn["max_nodes"]
    return st.builds(
        lambda low_high, rest: cls(min_nodes=low_high[0], max_nodes=low_high[1], **rest),
        limits,
        st.fixed_dictionaries(drawn),
    )


def _of(name: str, hint: Any) -> st.SearchStrategy[Any]:
    plain = {str: texts, float: numbers, bool: st.booleans(), int: integers}
    if name in meanings:
        return meanings[name]
    if hint == tuple[Member, ...]:
        unique = st.lists(records(Member), max_size=3, unique_by=lambda m: m.node_id)
        return unique.map(tuple)
    if get_origin(hint) is tuple:
        return st.lists(_of("", get_args(hint)[0]), max_size=3).map(tuple)
    if get_args(hint):
        return st.one_of(*(_of("", a) for a in get_args(hint)))
    if is_dataclass(hint):
        return records(cast("type[Any]", hint))
    return plain[hint] if hint in plain else st.from_type(hint)


any_record = st.one_of(
    *(
        records(cls)
        for cls in (WorldRecord, Node, Leader, FailureReport, ReplicaSlots, Done, Secret)
    )
)


@given(any_record)
def test_round_trip(record: Record) -> None:
    assert decode(type(record), KEY, encode(record)) == record


LEADER = {"node_id": "a", "address": "h", "liveness_port": 1, "version": RECORD_VERSION}
MEMBER = {
    "node_id": "a",
    "name": "n1",
    "nproc": 1,
    "role": "default",
    "liveness_host": "h",
    "liveness_port": 1,
    "memory_port": 2,
    "replica_port": 3,
    "ran_generation": 6,
    "process": {"table": "5f", "pid": 2, "start_ticks": 3},
}
WORLD = {
    "generation": 7,
    "members": [MEMBER],
    "store_host": "h",
    "store_port": 5,
    "nonce": "ab",
    "mode": "restart",
    "switch_at_step": None,
    "state": "active",
    "min_nodes": 1,
    "max_nodes": 2,
    "lineage": [5, 6],
    "cause": "first",
    "reason": "n1 starts",
    "time_s": 1.5,
    "committed_step": None,
    "replica_size": 2,
    "left_in_order": False,
    "leaving": [],
    "library": "0.1.0",
    "tls": True,
    "outside": [{"node_id": "cd", "name": "n2", "host": "10.0.0.2", "port": 4712}],
    "breakages": [
        {
            "generation": 6,
            "lived_s": 3.5,
            "steps": None,
            "failures": [
                {"node": "n1", "text": "boom", "exit_code": 1, "step": 3, "is_oom_kill": False}
            ],
            "lost": ["n2"],
            "time_s": 1.0,
            "left": [],
            "churned": [],
            "counts": True,
            "step": 3,
            "excluded": "",
            "verdict": "restart: unknown",
            "response": "formed generation 7 with n1",
            "attempts": 1,
        }
    ],
    "version": RECORD_VERSION,
}


def changed(data: dict[str, Any], path: str, value: Any) -> bytes:
    """``data`` with the field at ``path`` (``members.0.nproc``) set to ``value``."""
    copy = json.loads(json.dumps(data))
    *parents, last = path.split(".")
    at = copy
    for step in parents:
        at = at[int(step)] if isinstance(at, list) else at[step]
    at[last] = value
    return json.dumps(copy).encode()


def rejection(cls: type[WorldRecord] | type[Node] | type[Leader], value: bytes) -> str:
    """The error message, which always names the key."""
    with pytest.raises(RecordError) as caught:
        decode(cast("type[WorldRecord]", cls), KEY, value)
    assert caught.value.message.startswith(f"{KEY}: ")
    assert "delete the key" in caught.value.hint or "every node" in caught.value.hint
    assert len(caught.value.message) < 500
    return caught.value.message


def test_the_sample_records_are_valid() -> None:
    assert decode(WorldRecord, KEY, json.dumps(WORLD).encode()).members[0].process.pid == 2
    assert decode(Leader, KEY, json.dumps(LEADER).encode()).address == "h"


def test_an_integer_is_accepted_as_a_time() -> None:
    assert decode(WorldRecord, KEY, changed(WORLD, "time_s", 3)).time_s == 3.0


@pytest.mark.parametrize("path", ["colour", "members.0.colour", "members.0.process.colour"])
def test_an_unknown_field_is_rejected(path: str) -> None:
    assert "unknown 'colour'" in rejection(WorldRecord, changed(WORLD, path, "red"))


@pytest.mark.parametrize("field", sorted(WORLD))
def test_a_missing_field_is_rejected(field: str) -> None:
    rest = {k: v for k, v in WORLD.items() if k != field}
    assert f"missing '{field}'" in rejection(WorldRecord, json.dumps(rest).encode())


def test_a_missing_nested_field_is_reported_with_its_path() -> None:
    member = {k: v for k, v in MEMBER.items() if k != "role"}
    message = rejection(WorldRecord, changed(WORLD, "members", [MEMBER, member]))
    assert "members[1]: missing 'role'" in message


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("generation", "7", "int"),
        ("generation", 7.0, "int"),
        ("generation", True, "int"),
        ("generation", None, "int"),
        ("members", {}, "array"),
        ("members", None, "array"),
        ("members", ["n1"], "object"),
        ("members.0.process", [], "object"),
        ("members.0.process.pid", "2", "int"),
        ("lineage", ["5"], "int"),
        ("nonce", 3, "str"),
        ("time_s", "now", "float"),
        ("time_s", True, "float"),
        ("switch_at_step", "soon", "int"),
        ("state", "sleepy", "one of: active, paused"),
        ("state", [], "one of: active, paused"),
        ("cause", None, "one of: first"),
    ],
)
def test_a_wrong_type_is_rejected(path: str, value: Any, expected: str) -> None:
    message = rejection(WorldRecord, changed(WORLD, path, value))
    assert expected in message
    assert path.split(".")[-1] in message
    assert f"={value!r}, " in message or f"={value[0]!r}, " in message


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("generation", 0, "generation=0"),
        ("members.0.nproc", 0, "nproc=0"),
        ("members", [MEMBER, MEMBER], "twice"),
        ("min_nodes", 3, "min_nodes=3 and max_nodes=2"),
        ("min_nodes", 0, "min_nodes=0"),
    ],
)
def test_an_invalid_value_is_rejected(path: str, value: Any, message: str) -> None:
    assert message in rejection(WorldRecord, changed(WORLD, path, value))


@given(records(Node), st.sampled_from([[], [70000], [-1]]))
def test_a_node_without_valid_ports_is_rejected(node: Node, ports: list[int]) -> None:
    """The leader would select its port with ``generation % len(ports)``."""
    data = json.loads(encode(node)) | {"ports": ports}
    message = rejection(Node, json.dumps(data).encode())
    assert "has ports" in message and str(ports[0] if ports else ports) in message


@pytest.mark.parametrize("version", [0, RECORD_VERSION + 1, str(RECORD_VERSION), None, [1]])
def test_another_version_is_rejected(version: Any) -> None:
    message = rejection(WorldRecord, changed(WORLD, "version", version))
    assert f"record version {version!r}, this library reads {RECORD_VERSION}" in message


def test_the_version_is_checked_before_unknown_fields() -> None:
    newer = json.dumps(LEADER | {"version": RECORD_VERSION + 1, "colour": "red"}).encode()
    assert f"record version {RECORD_VERSION + 1}" in rejection(Leader, newer)


@pytest.mark.parametrize("version", [float(RECORD_VERSION), True])
def test_a_version_that_is_not_an_integer_is_rejected(version: Any) -> None:
    assert "version" in rejection(WorldRecord, changed(WORLD, "version", version))


@given(records(Node), records(WorldRecord))
def test_a_nodes_record_only_names_the_world_that_it_runs(node: Node, world: WorldRecord) -> None:
    """With the world's members in each of its members' keys, a listing would be quadratic."""
    running = WorldReference(generation=world.generation, nonce=world.nonce)
    record = encode(replace(node, running=world))
    assert record == encode(replace(node, running=running))
    assert decode(Node, KEY, record).running == running


NODES = 10_000


def large_world() -> WorldRecord:
    """Of nodes with random ids, as on machines that were not cloned from each other."""
    random = Random(7)

    def identifier(digits: int) -> str:
        return f"{random.getrandbits(4 * digits):0{digits}x}"

    def member(number: int) -> Member:
        name = f"gpu-cluster-a-worker-{number:05d}"
        process = ProcessIdentity(
            host=name,
            machine_id=identifier(32),
            boot_id=identifier(36),
            pod_uid=identifier(36),
            pid_namespace=4026531836,
            pid=random.randrange(1 << 22),
            start_ticks=random.randrange(1 << 30),
        )
        return Member(
            node_id=identifier(16),
            name=name,
            nproc=8,
            role="default",
            liveness_host=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
            liveness_port=random.randrange(32768, 61000),
            process=process.digest,
            memory_port=random.randrange(32768, 61000),
            replica_port=random.randrange(32768, 61000),
        )

    members = tuple(member(number) for number in range(NODES))
    return replace(decode(WorldRecord, KEY, json.dumps(WORLD).encode()), members=members)


def test_the_world_of_ten_thousand_nodes_is_far_below_etcds_limit() -> None:
    """etcd refuses values of more than 1.5 MiB, and the liveness connection those of 1 MiB."""
    world = large_world()
    record = encode(world)
    assert len(record) < 640 << 10
    assert decode(WorldRecord, KEY, record) == world


def incompressible(characters: int) -> str:
    return "".join(Random(characters).choices(string.ascii_letters + string.digits, k=characters))


def worst_breakage(generation: int) -> BreakageRecord:
    """As many nodes and as long texts as the leader records."""
    names = tuple(f"{incompressible(40)}{number}" for number in range(1000))
    failures = tuple(
        Failed(node_id=name, node=name, text=incompressible(10_000), exit_code=1)
        for name in names[:REMEMBERED]
    )
    breakage = Breakage(
        generation=generation,
        lived_s=1.5,
        failures=tuple(map(remembered, failures)),
        lost=names,
        left=names,
        churned=names,
        at_s=0.0,
        verdict=incompressible(200),
        response=incompressible(300),
    )
    return to_record(breakage, 1.5)


def test_every_record_of_ten_thousand_nodes_is_below_etcds_limit() -> None:
    """With as many nodes outside, and the worst failures that are recorded."""
    world = large_world()
    breakages = tuple(map(worst_breakage, range(REMEMBERED)))
    random = Random(8)
    outside = tuple(
        MemoryLocation(
            node_id=f"{random.getrandbits(64):016x}",
            name=member.name,
            host=member.liveness_host,
            port=member.memory_port,
        )
        for member in world.members
    )
    broken = replace(world, breakages=breakages, outside=outside)
    left = replace(broken, members=(), leaving=world.members)
    done = Done(
        outcome=Outcome.FAILURE,
        reason=incompressible(10_000),
        exit_code=70,
        generation=8,
        final_step=9,
        time_s=1.5,
        breakages=breakages,
    )
    slots = tuple(
        NodeReplica(
            nonce=f"{random.getrandbits(32):08x}",
            slots=tuple(
                ReplicaSlot(node_id=m.node_id, start=f"{random.getrandbits(32):08x}") for m in pair
            ),
        )
        for pair in zip(world.members[::2], world.members[1::2], strict=True)
    )
    progress = JobProgress(
        node_id=world.node_ids[0],
        generation=8,
        step=9,
        step_time_s=0.5,
        checkpoint_step=7,
        time_s=1.5,
        heartbeats=tuple(
            RecordedHeartbeat(
                node_id=node_id,
                generation=8,
                step=random.randrange(1 << 20),
                heard_at_s=1.8e9 + random.randrange(100) / 10,
            )
            for node_id in world.node_ids
        ),
        waiting=tuple(
            WaitingNode(node_id=node_id, reason=incompressible(MAX_REASON_CHARS))
            for node_id in world.node_ids[:MAX_WAITING]
        ),
    )
    records = [encode(record) for record in (broken, left, done, ReplicaSlots(replicas=slots))]
    sizes = [len(record) for record in (*records, encode_progress(progress))]
    assert max(sizes) < 1 << 20, sizes  # etcd: 1.5 MiB, the liveness connection: 1 MiB


def test_small_records_stay_legible() -> None:
    assert json.loads(encode(decode(WorldRecord, KEY, json.dumps(WORLD).encode()))) == WORLD


def test_a_damaged_or_endless_compressed_record_is_rejected() -> None:
    reason = "n1 starts".ljust(COMPRESSED_FROM_BYTES)
    record = encode(decode(WorldRecord, KEY, changed(WORLD, "reason", reason)))
    assert decode(WorldRecord, KEY, record).reason == reason
    assert "is damaged" in rejection(WorldRecord, record[:40] + b"?" + record[41:])
    assert "is incomplete" in rejection(WorldRecord, record[:-1])
    bomb = zlib.compress(b" " * (MAX_RECORD_BYTES + 1))
    assert "more than 64 MiB" in rejection(WorldRecord, bomb)


@pytest.mark.parametrize("value", [b"[]", b"3", b'"x"', b"null", b"true"])
def test_json_that_is_not_an_object_is_rejected(value: bytes) -> None:
    assert "not an object" in rejection(WorldRecord, value)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"\x80\x81",
        json.dumps(WORLD).encode() + b"x",
        json.dumps(WORLD).replace("1.5", "NaN").encode(),
        json.dumps(WORLD).replace("1.5", "-Infinity").encode(),
        json.dumps(WORLD).replace('"nonce"', '"generation": 8, "nonce"').encode(),
    ],
    ids=lambda value: repr(value[:12]),
)
def test_invalid_json_is_rejected(value: bytes) -> None:
    assert "is not JSON" in rejection(WorldRecord, value)


def test_out_of_range_numbers_are_rejected() -> None:
    message = rejection(WorldRecord, json.dumps(WORLD).replace("1.5", "1e999").encode())
    assert "1e999 is not a finite number" in message
    assert "401 digits" in rejection(WorldRecord, changed(WORLD, "time_s", 10**400))


@pytest.mark.parametrize("value", [b"[" * 100_000, b'{"a":' * 100_000])
def test_deep_nesting_is_rejected(value: bytes) -> None:
    assert "nested more than" in rejection(WorldRecord, value)


def test_deep_nesting_in_a_field_is_rejected() -> None:
    def nested(depth: int) -> bytes:
        return json.dumps(WORLD).replace('"ab"', "[" * depth + "]" * depth).encode()

    assert "nonce=[[" in rejection(WorldRecord, nested(9))
    assert "nested more than" in rejection(WorldRecord, nested(900))


@pytest.mark.parametrize("path", ["generation", "state", "members.0.nproc", "\ud800"])
def test_a_lone_surrogate_is_rejected_outside_text_fields(path: str) -> None:
    assert "not valid Unicode" in rejection(WorldRecord, changed(WORLD, path, "\ud800"))


def test_a_name_of_undecodable_bytes_survives_a_round_trip() -> None:
    """Python decodes them to surrogates, which the store preserves."""
    odd = changed(WORLD, "members.0.name", os.fsdecode(b"node-\xff"))
    world = decode(WorldRecord, KEY, odd)
    assert decode(WorldRecord, KEY, encode(world)) == world
    assert os.fsencode(world.members[0].name) == b"node-\xff"


@given(st.binary(max_size=200))
def test_random_bytes_are_rejected(value: bytes) -> None:
    rejection(WorldRecord, value)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(WORLD)), json_values)
def test_any_value_in_any_field_is_decoded_or_rejected(field: str, value: Any) -> None:
    data = json.dumps(WORLD | {field: value}).encode()
    try:
        world = decode(WorldRecord, KEY, data)
    except RecordError as error:
        assert error.message.startswith(f"{KEY}: ")
    else:
        assert json.loads(encode(world)) == json.loads(data)


# ── keys ─────────────────────────────────────────────────────────────────────────────────────


def test_keys_start_with_the_prefix_and_the_run_id() -> None:
    keys = Keys.of("/elastic/", "job 1")
    assert keys.root == "/elastic/job 1/"
    assert keys.node("a") == "/elastic/job 1/nodes/a"
    assert keys.failure_report("a") == "/elastic/job 1/failure_reports/a"
    assert (keys.leader, keys.world, keys.done) == (
        "/elastic/job 1/leader",
        "/elastic/job 1/world",
        "/elastic/job 1/done",
    )


@pytest.mark.parametrize("run_id", ["", "a/b", "a\nb", "\x00", "a\x7f", "\x85", "\udcff"])
def test_invalid_run_ids_are_rejected(run_id: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Keys.of("/elastic", run_id)
    assert repr(run_id) in caught.value.message and "--rdzv-id" in caught.value.hint


@pytest.mark.parametrize(
    ("prefix", "run_id"), [("/elastic/team", "nodes"), ("/elastic/team/hangs", "job")]
)
def test_no_job_is_among_the_keys_of_another_one(prefix: str, run_id: str) -> None:
    with pytest.raises(ConfigError, match="another job"):
        Keys.of(prefix, run_id)
    assert Keys.of("/nodes", "job").root == "/nodes/job/"


@pytest.mark.parametrize("prefix", ["", "elastic", "/a\nb", "/\udcff"])
def test_invalid_prefixes_are_rejected(prefix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Keys.of(prefix, "job")
    assert repr(prefix) in caught.value.message and "ELASTIC_PREFIX" in caught.value.hint
