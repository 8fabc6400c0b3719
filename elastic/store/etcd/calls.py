"""Unary calls with retries: tenacity decides when, this module what and for how long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tenacity

from elastic.clock import Clock
from elastic.errors import CoordinationError, LeaseGone, StoreFull, StoreRefused
from elastic.store.etcd.backoff import pause_s
from elastic.store.etcd.connection import EtcdConnection, EtcdConnections
from elastic.store.etcd.failures import CallFailure, Remedy
from elastic.tuning.agent_intervals import (
    STORE_FIRST_ATTEMPT_S,
    STORE_MIN_ATTEMPT_S,
)

Observer = Callable[[str, float, bool], None]
"""Called with the purpose of a request, its duration in seconds, and whether it has failed."""

_AGAIN = frozenset({Remedy.RETRY, Remedy.DOUBT, Remedy.MOVE, Remedy.LOGIN})


@dataclass(frozen=True)
class Reply:
    """etcd's response, and whether an earlier attempt may have been executed, too."""

    message: Any
    in_doubt: bool


class Calls:
    """Makes unary calls on the current connection; thread-safe."""

    def __init__(self, connections: EtcdConnections, clock: Clock, closed: threading.Event) -> None:
        self._connections = connections
        self._clock = clock
        self._closed = closed  # ends the pauses between attempts
        self.observer: Observer | None = None

    def __call__(
        self,
        what: str,
        method: Callable[[EtcdConnection], Callable[..., Any]],
        request: Any,
        *,
        timeout_s: float | None = None,
        tolerate: frozenset[Remedy] = frozenset(),
    ) -> Reply | CallFailure:
        """Call until etcd responds or the time is up.

        Returns a CallFailure only if its remedy is in ``tolerate``; raises CoordinationError.
        """
        began_s, has_failed = self._clock.monotonic(), True
        try:
            reply = self._until_answered(what, method, request, timeout_s, tolerate)
            has_failed = False
            return reply
        finally:
            if self.observer is not None:
                self.observer(what, self._clock.monotonic() - began_s, has_failed)

    def _until_answered(
        self,
        what: str,
        method: Callable[[EtcdConnection], Callable[..., Any]],
        request: Any,
        timeout_s: float | None,
        tolerate: frozenset[Remedy],
    ) -> Reply | CallFailure:
        limit_s = self._connections.config.request_timeout_s if timeout_s is None else timeout_s
        ends_s = self._clock.monotonic() + limit_s
        sent, answered = 0, None  # the last attempt that etcd itself answered with an error

        def attempt() -> Reply:
            nonlocal sent, answered
            connection = self._connections.current(ends_s)
            left_s = max(ends_s - self._clock.monotonic(), STORE_MIN_ATTEMPT_S)
            in_doubt = sent > 0
            sent += 1
            patience_s = min(left_s, STORE_FIRST_ATTEMPT_S * 2 ** (sent - 1))
            try:
                message = self._connections.invoke(
                    connection, method(connection), request, patience_s
                )
            except CallFailure as failure:
                answered = failure if failure.remedy is Remedy.RETRY else answered
                raise
            return Reply(message, in_doubt)

        try:
            return self._retrying(limit_s)(attempt)
        except CallFailure as failure:
            if failure.remedy in tolerate:
                return failure
            # The last attempt had only the remaining time, so its timeout is not the cause.
            cause = answered if failure.remedy is Remedy.DOUBT else None
            raise self._error(what, cause or failure) from None

    def _retrying(self, limit_s: float) -> tenacity.Retrying:
        def wait(state: tenacity.RetryCallState) -> float:
            wanted_s = pause_s(state.attempt_number - 1)
            return max(0.0, min(wanted_s, limit_s - (state.seconds_since_start or 0.0)))

        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(self._worth_retrying),
            stop=tenacity.stop_after_delay(limit_s),
            wait=wait,
            sleep=self._pause,
            reraise=True,
        )

    def _pause(self, seconds: float) -> None:
        self._clock.wait(self._closed, seconds)

    def _worth_retrying(self, error: BaseException) -> bool:
        return (
            isinstance(error, CallFailure)
            and error.remedy in _AGAIN
            and not self._closed.is_set()
            and not self._connections.hopeless
        )

    def _error(self, what: str, failure: CallFailure) -> CoordinationError:
        if failure.remedy is Remedy.LEASE_GONE:
            return LeaseGone(f"{what}: the lease is gone")
        if failure.remedy is Remedy.REFUSED:
            return StoreRefused(
                f"{what}: etcd refused: {failure.reason}",
                hint="check user and password, and the user's role in etcd",
            )
        if failure.remedy is Remedy.FULL:
            return StoreFull(
                f"{what}: etcd is full (NOSPACE), and refuses all writes ({failure.reason})",
                hint="free it: `etcdctl compact REVISION` with the revision in `etcdctl endpoint "
                "status -w json`, then `etcdctl defrag` on each member and `etcdctl alarm disarm`; "
                "raise its --quota-backend-bytes",
            )
        if failure.remedy in _AGAIN or failure.remedy is Remedy.NOT_ETCD:
            return self._connections.error(what, failure)
        return CoordinationError(f"{what}: {failure.reason}")
