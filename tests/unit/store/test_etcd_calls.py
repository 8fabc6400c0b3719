"""The error that a call to etcd raises after its deadline."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.errors import SYSTEM_CLOCK, CoordinationError
from elastic.store.client import CallFailure, Calls, Remedy


class Connections:
    """Fails with the given failures in order, and repeats the last one."""

    hopeless = False
    config = SimpleNamespace(request_timeout_s=0.3)

    def __init__(self, *failures: CallFailure) -> None:
        self._failures = list(failures)

    def current(self, ends_s: float) -> None: ...

    def invoke(self, *_: object) -> None:
        raise self._failures.pop(0) if len(self._failures) > 1 else self._failures[0]

    def error(self, what: str, last: CallFailure) -> CoordinationError:
        return CoordinationError(f"{what}: {last.reason}")


def raised(*failures: CallFailure) -> str:
    connections: Any = Connections(*failures)
    with pytest.raises(CoordinationError) as error:
        calls = Calls(connections, SYSTEM_CLOCK, threading.Event())
        calls("grant a lease", lambda connection: lambda: None, None)
    return str(error.value)


NO_SPACE = CallFailure(Remedy.RETRY, "database space exceeded")
NO_TIME = CallFailure(Remedy.DOUBT, "Deadline Exceeded")


def test_a_timed_out_attempt_does_not_hide_an_earlier_answer() -> None:
    assert raised(NO_SPACE, NO_TIME) == "grant a lease: database space exceeded"


def test_a_call_without_any_answer_reports_the_deadline() -> None:
    assert raised(NO_TIME) == "grant a lease: Deadline Exceeded"
