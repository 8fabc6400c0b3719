"""Messages between agent and worker: exactly these messages, or a LinkError."""

from __future__ import annotations

import json
import os
import typing
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import LinkError
from elastic.link.protocol import (
    FROM_AGENT,
    FROM_WORKER,
    MAX_MESSAGE,
    Bye,
    Heartbeat,
    Hello,
    Message,
    Ready,
    WorldMessage,
    decode,
    encode,
)

WORLD = WorldMessage(
    generation=3,
    nonce="aa",
    member=True,
    rank=1,
    size=3,
    local_rank=0,
    local_size=1,
    node_rank=1,
    nodes=3,
    store_host="10.0.0.1",
    store_port=4711,
    store_key="",
    switch_at_step=None,
    state="active",
    lineage=(1, 2),
    cause="lost",
    reason="n3 is lost",
    committed_step=12,
)
SAID = [
    WORLD,
    Hello(version=1, pid=2, local_rank=0, library="0.1"),
    Heartbeat(generation=1, step=2, phase="step", step_time_s=0.1),
    Ready(),
    Bye(clean=False, error="ValueError: ä\n"),
]


@pytest.mark.parametrize("message", SAID, ids=lambda m: type(m).__name__)
def test_a_message_comes_back(message: Message) -> None:
    line = encode(message)
    assert decode(line) == message


@given(st.binary())
def test_garbage_is_a_link_error(line: bytes) -> None:
    with pytest.raises(LinkError):
        decode(line)


@given(
    st.sampled_from([f.name for f in fields(WORLD)]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
)
def test_a_field_of_another_kind_is_a_link_error_or_fits(name: str, value: Any) -> None:
    data = json.loads(encode(WORLD))
    data[name] = value
    line = json.dumps(data).encode()
    try:
        message = decode(line)
    except LinkError as error:
        assert name in str(error) or "NaN" in str(error) or "not" in str(error)
    else:
        kind = typing.get_type_hints(WorldMessage)[name]
        found = getattr(message, name)
        assert isinstance(found, typing.get_origin(kind) or kind) or kind == (int | None)


@pytest.mark.parametrize(
    "line",
    [
        b'{"type": "Ready", "more": 1}',
        b'{"type": "Hello", "version": 1}',
        b'{"type": "os.system"}',
        b'{"type": ["Ready"]}',
        b'["Ready"]',
        b"[" * 100_000,
        b'{"type": "Heartbeat", "generation": true, "step": 1, "phase": "", "step_time_s": 1}',
        b'{"type": "Heartbeat", "generation": 1, "step": 1, "phase": "", "step_time_s": 1e999}',
        b'{"type": "Ready", "type": "Ready"}',
        b'{"type": "Left", "step": Infinity}',
        b'{"type": "Heartbeat", "generation": 1, "step": 1, "step_time_s": 1, "phase": "%s"}'
        % (b"x" * 4096),
    ],
    ids=lambda line: line[:30].decode(),
)
def test_what_is_no_message(line: bytes) -> None:
    with pytest.raises(LinkError):
        decode(line)


def test_long_errors_lose_their_middle() -> None:
    said = decode(encode(Bye(clean=False, error="first\U0001f525" + "\U0001f525" * 10**6 + "last")))
    assert isinstance(said, Bye)
    assert said.error.startswith("first")
    assert said.error.endswith("last")


def test_what_no_log_can_write_is_replaced() -> None:
    error = os.fsdecode(b"no such file: \xff")
    assert decode(encode(Bye(clean=False, error=error))) == Bye(
        clean=False, error="no such file: ?"
    )


def test_what_the_other_end_would_not_take_is_not_sent() -> None:
    with pytest.raises(LinkError, match="WorldMessage"):
        encode(replace(WORLD, lineage=tuple(range(10**5))))
    line = json.dumps({"type": "Bye", "clean": True, "error": "x" * MAX_MESSAGE}).encode()
    with pytest.raises(LinkError, match="bytes"):
        decode(line)


def test_the_key_of_the_store_stands_in_no_log() -> None:
    assert "c2VjcmV0" not in repr(replace(WORLD, store_key="c2VjcmV0"))


def test_every_message_is_of_one_side() -> None:
    assert {*FROM_WORKER, *FROM_AGENT} == set(typing.get_args(Message))
    assert not {*FROM_WORKER} & {*FROM_AGENT}
