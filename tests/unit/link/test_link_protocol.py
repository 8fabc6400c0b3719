"""Messages between agent and worker: anything else is a LinkError."""

from __future__ import annotations

import functools
import json
import operator
import os
import typing
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.assignments import assignment

from elastic.errors import LinkError
from elastic.hangs.page import StepDurations
from elastic.link.link import (
    FROM_AGENT,
    FROM_WORKER,
    MAX_MESSAGE,
    Assignment,
    ClientHandshakeRequest,
    CountEvents,
    Exiting,
    Heartbeat,
    Leave,
    MeasureSteps,
    Message,
    Ready,
    StepReport,
    decode,
    encode,
)
from elastic.telemetry.events import CheckpointSaved, CheckpointSkipped
from elastic.wire.tls import TlsFiles

WORLD = assignment(3, lineage=(1, 2), rank=1, size=3, store_tls=TlsFiles("/ca", "/cert", "/key"))
SAID = [
    WORLD,
    assignment(3),
    Leave(generation=3, nodes=2, nodes_leaving=1, switch_at_step=30),
    ClientHandshakeRequest(version=1, pid=2, local_rank=0, library="0.1"),
    Heartbeat(generation=1, step=2, phase="step", step_time_s=0.1),
    Ready(),
    StepReport(
        times=StepDurations(
            generation=3,
            window=1,
            steps=18,
            samples=144,
            data_s=0.001,
            compute_s=0.1,
            collective_s=0.0,
            checkpoint_s=0.0,
            script_s=1e-9,
        )
    ),
    MeasureSteps(window_s=10.0),
    CountEvents(),
    CheckpointSaved(name="step-10", step=10, duration_s=3.0, stall_s=0.5, bytes=1000),
    CheckpointSkipped(name="step-15", reason="the disk is full"),
    Exiting(clean=False, error="ValueError: ä\n"),
]


@pytest.mark.parametrize("message", SAID, ids=lambda m: type(m).__name__)
def test_messages_round_trip(message: Message) -> None:
    line = encode(message)
    assert decode(line) == message


@given(st.binary())
def test_garbage_is_a_link_error(line: bytes) -> None:
    with pytest.raises(LinkError):
        decode(line)


PATHS = [
    *((f.name,) for f in fields(Assignment)),
    *(("store_tls", f.name) for f in fields(TlsFiles)),
]


@given(
    st.sampled_from(PATHS),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
)
def test_a_field_of_another_type_is_a_link_error_or_fits(path: tuple[str, ...], value: Any) -> None:
    data = json.loads(encode(WORLD))
    *parents, name = path
    functools.reduce(operator.getitem, parents, data)[name] = value
    line = json.dumps(data).encode()
    try:
        message = decode(line)
    except LinkError as error:
        assert name in str(error) or "not" in str(error)
    else:
        assert json.loads(encode(message)) == data


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("nodes",), "3", "Assignment has nodes='3', expected int, got str"),
        (("lineage",), [1, True], r"has lineage\[1\]=True, expected int, got bool"),
        (("state",), "gone", "has state='gone', expected one of: active, paused"),
        (("colour",), 1, "has in the top: unknown 'colour'"),
        (("store_tls", "cert"), 1, r"has store_tls\.cert=1, expected str, got int"),
        (("store_tls", "colour"), 1, "has in store_tls: unknown 'colour'"),
        (("store_tls",), {"cert": "a"}, "has in store_tls: missing"),
        (("store_tls",), [], r"has store_tls=\[\], expected object . null, got array"),
    ],
)
def test_an_error_names_the_message_the_field_and_the_value(
    path: tuple[str, ...], value: Any, said: str
) -> None:
    data = json.loads(encode(WORLD))
    *parents, name = path
    functools.reduce(operator.getitem, parents, data)[name] = value
    with pytest.raises(LinkError, match=said):
        decode(json.dumps(data).encode())


def test_a_message_without_a_field_is_rejected() -> None:
    data = json.loads(encode(WORLD))
    del data["store_tls"]
    with pytest.raises(LinkError, match="missing 'store_tls'"):
        decode(json.dumps(data).encode())


@pytest.mark.parametrize(
    "line",
    [
        b'{"type": "Ready", "more": 1}',
        b'{"type": "ClientHandshakeRequest", "version": 1}',
        b'{"type": "os.system"}',
        b'{"type": ["Ready"]}',
        b'["Ready"]',
        b"[" * 100_000,
        b'{"type": "Heartbeat", "generation": true, "step": 1, "phase": "", "step_time_s": 1}',
        b'{"type": "Heartbeat", "generation": 1, "step": 1, "phase": "", "step_time_s": 1e999}',
        b'{"type": "Ready", "type": "Ready"}',
        b'{"type": "Left", "step": Infinity}',
        b'{"type": "Left", "step": "\\ud800"}',
        b'{"type": "Left", "step": 1, "\\ud800": 1}',
        b'{"type": "Heartbeat", "generation": 1, "step": 1, "step_time_s": 1, "phase": "%s"}'
        % (b"x" * 4096),
    ],
    ids=lambda line: line[:30].decode(),
)
def test_invalid_messages_are_rejected(line: bytes) -> None:
    with pytest.raises(LinkError):
        decode(line)


def test_long_errors_are_truncated_in_the_middle() -> None:
    said = decode(
        encode(Exiting(clean=False, error="first\U0001f525" + "\U0001f525" * 10**6 + "last"))
    )
    assert isinstance(said, Exiting)
    assert said.error.startswith("first")
    assert said.error.endswith("last")


def test_text_that_cannot_be_encoded_is_replaced() -> None:
    error = os.fsdecode(b"no such file: \xff")
    assert decode(encode(Exiting(clean=False, error=error))) == Exiting(
        clean=False, error="no such file: ?"
    )


def test_texts_in_a_record_are_truncated_and_replaced() -> None:
    path = "first" + "x" * 10**5 + os.fsdecode(b"\xff") + "last"
    said = decode(encode(replace(WORLD, store_tls=TlsFiles("/ca", path, "/key"))))
    assert isinstance(said, Assignment) and said.store_tls is not None
    assert said.store_tls.cert.endswith("?last") and len(said.store_tls.cert) < 5000


def test_a_message_that_the_receiver_would_reject_is_not_sent() -> None:
    with pytest.raises(LinkError, match="Assignment"):
        encode(replace(WORLD, lineage=tuple(range(10**5))))
    line = json.dumps({"type": "Exiting", "clean": True, "error": "x" * MAX_MESSAGE}).encode()
    with pytest.raises(LinkError, match="bytes"):
        decode(line)


def test_an_event_with_oversized_texts_is_sent_truncated() -> None:
    text = "\U0001f525" * 10**6
    said = decode(encode(CheckpointSkipped(name=text, reason=text)))
    assert isinstance(said, CheckpointSkipped)
    assert max(len(said.name), len(said.reason)) < 5000


def test_the_key_of_the_store_is_not_logged() -> None:
    assert "c2VjcmV0" not in repr(replace(WORLD, store_key="c2VjcmV0"))


def test_every_message_has_exactly_one_direction() -> None:
    assert {*FROM_WORKER, *FROM_AGENT} == set(typing.get_args(Message))
    assert not {*FROM_WORKER} & {*FROM_AGENT}
