"""When to give up, and whom to leave out for a while. Pure: time comes in as an argument.

A job stops for one of two reasons. The same error of the *script* broke three worlds in a row
without progress between them: going on cannot help, so it ends with that error. Or worlds keep
breaking without a healthy one between: the budget is spent. A healthy world refunds everything:
one that made ``healthy_steps``, or lived ``healthy_s`` where steps are not known (restart mode).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic.tuning.agent_intervals import FAILURE_WINDOW_S, FLAP_WINDOW_S, HEALTHY_S, QUARANTINE_S

# What a worker says when a *peer* failed: a consequence, never the reason to end a job.
# Seen with torch 2.13: gloo "Connection closed by peer [127.0.0.1]:1234", "Connection reset by
# peer", "Read error"; c10d "Broken pipe", "DistNetworkError", "DistStoreError: Timed out"; NCCL
# "unhandled system error", "remote process exited", "ProcessGroupNCCL's watchdog".
_TRANSPORT = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|(closed|reset) by (remote )?peer"
    r"|broken pipe|timed out|network is unreachable|no route to host|socket"
    r"|\bgloo\b|nccl|process ?group|dist(backend|network|store)error|tcpstore|watchdog"
    r"|remote process exited|connection(reset|refused|aborted)?error",
    re.IGNORECASE,
)
_KILLED = (-9, -15)  # SIGKILL, SIGTERM: somebody from outside, or out of memory
_TELLING = {2, 65}  # elastic.errors: wrong use, no valid checkpoint: the job ends with them, too
_RANK = re.compile(r"^\s*\[rank\s*\d+\]:?\s*", re.IGNORECASE | re.MULTILINE)
_ADDRESS = re.compile(r"\b0x[0-9a-f]+\b", re.IGNORECASE)


@dataclass(frozen=True)
class Failure:
    """How the workers of one node ended."""

    node: str  # its name
    text: str | None  # the script's error, if it left one
    exit_code: int | None  # negative: the signal


@dataclass(frozen=True, kw_only=True)
class Breakage:
    """A world that broke."""

    generation: int
    lived_s: float
    failures: tuple[Failure, ...]
    lost: tuple[str, ...]  # names of members that were lost
    at_s: float  # monotonic
    steps: int | None = None  # made since the breakage before; None: not known


@dataclass(frozen=True, kw_only=True)
class FailureBudget:
    """``budget`` breakages in ``failure_window_s`` are tolerated, one more is not."""

    budget: int = 10
    failure_window_s: float = FAILURE_WINDOW_S
    healthy_s: float = HEALTHY_S
    # Steps made in-process are never lost: a job that makes twenty between failures gets on.
    healthy_steps: int = 20
    same_error: int = 3  # worlds in a row that the same error of the script may break


@dataclass(frozen=True, kw_only=True)
class StopJob:
    """The job must end. ``exit_code``: 70 for a spent budget; for the script's own error
    its exit code if that is one of ours (2, 65), else 1."""

    reason: str
    exit_code: int


def is_consequence(text: str | None) -> bool:
    """Whether a worker's error says no more than that a peer is gone, or does not answer."""
    return bool(text) and _TRANSPORT.search(text or "") is not None


def healthy(breakage: Breakage, policy: FailureBudget) -> bool:
    """Whether the world had got on before it broke.

    Steps can be slow: a world also counts that lived long and made a few. One or two may be only
    a report that came late, and a world that stands still is not healthy however long it lives.
    """
    lived_long = breakage.lived_s >= policy.healthy_s
    if breakage.steps is None:
        return lived_long
    return breakage.steps >= policy.healthy_steps or (lived_long and breakage.steps > 2)


def verdict(history: Sequence[Breakage], now: float, policy: FailureBudget) -> StopJob | None:
    """Whether the broken worlds (newest last) are reason to stop."""
    return _script_error(history, policy) or _budget_spent(history, now, policy)


def _script_error(history: Sequence[Breakage], policy: FailureBudget) -> StopJob | None:
    latest = list(history)[-policy.same_error :]
    if len(latest) < policy.same_error or any(healthy(b, policy) for b in latest[1:]):
        return None
    common = set(_script_errors(latest[-1]))
    for breakage in latest[:-1]:
        common &= set(_script_errors(breakage))
    # In the order of the newest report: the first to fail comes first.
    said = next((said for key, said in _script_errors(latest[-1]).items() if key in common), None)
    if said is None:
        return None
    reason = f"the script failed {len(latest)} times in a row in the same way: {said}"
    return StopJob(reason=reason, exit_code=exit_code_of(f.exit_code for f in latest[-1].failures))


def exit_code_of(codes: Iterable[int | None]) -> int:
    """The job's, if the script's own error ends it: a worker's, if that is one of ours, else 1."""
    return next((code for code in codes if code in _TELLING), None) or 1


def _script_errors(breakage: Breakage) -> dict[str, str]:
    """What the script itself did wrong: comparable text -> words for people."""
    failures = breakage.failures
    if breakage.lost or not failures or any(f.exit_code in _KILLED for f in failures):
        return {}
    texts = [f for f in failures if f.text and not is_consequence(f.text)]
    if texts:
        return {_comparable(f.text or ""): f"{(f.text or '').strip()} (on {f.node})" for f in texts}
    if any(f.exit_code is None or f.exit_code <= 0 for f in failures):
        return {}
    silent = [f for f in failures if not f.text]
    return {f"exit {f.exit_code}": f"exit code {f.exit_code} (on {f.node})" for f in silent}


def _comparable(text: str) -> str:
    """The text without what differs between runs of the same mistake."""
    return " ".join(_ADDRESS.sub("0x", _RANK.sub("", text)).split())


def _budget_spent(history: Sequence[Breakage], now: float, policy: FailureBudget) -> StopJob | None:
    spent = 0
    for breakage in reversed(history):
        if breakage.at_s < now - policy.failure_window_s:
            break
        spent += 1
        if healthy(breakage, policy):  # it refunded everything before it
            break
    if spent <= policy.budget:
        return None
    last = history[-1]
    reason = (
        f"{spent} worlds broke within {policy.failure_window_s:g} s, none of them lived "
        f"{policy.healthy_s:g} s; the last was generation {last.generation} ({_what(last)})"
    )
    return StopJob(reason=reason, exit_code=70)


def _what(breakage: Breakage) -> str:
    said = [f"{name} lost" for name in breakage.lost]
    for f in breakage.failures:
        lines = (f.text or "").strip().splitlines()
        said.append(f"{f.node}: {lines[-1] if lines else f'exit code {f.exit_code}'}")
    return "; ".join(said) or "no failure was reported"


@dataclass(frozen=True, kw_only=True)
class FlapPolicy:
    """How often a node may be lost or accused before it is left out for ``quarantine_s``."""

    losses: int = 3
    accusations: int = 3
    flap_window_s: float = FLAP_WINDOW_S
    quarantine_s: float = QUARANTINE_S


class FlapTracker:
    """Which nodes, by name, are left out for a while: those that keep vanishing, and the one
    that is the first to fail again and again. State without I/O; for one thread."""

    def __init__(self, policy: FlapPolicy | None = None) -> None:
        self._policy = policy or FlapPolicy()
        self._losses: dict[str, deque[float]] = {}
        self._accused = ""
        self._accusations: list[float] = []
        self._until: dict[str, float] = {}

    def lost(self, node: str, now: float) -> None:
        """A node was lost. The third time within ``flap_window_s`` it cools down."""
        times = self._losses.setdefault(node, deque(maxlen=self._policy.losses))
        times.append(now)
        if len(times) == self._policy.losses and now - times[0] <= self._policy.flap_window_s:
            self.cool(node, now)
        self._forget(now)

    def found(self, node: str) -> None:
        """The node that was lost last lives: it is not held against it."""
        if times := self._losses.get(node):
            times.pop()
            if not times:
                del self._losses[node]

    def accused(self, node: str, now: float) -> None:
        """A node was the first to fail in a world that nobody was lost from.

        The third time in a row it cools down. A row ends with the accusation of another node,
        and with ``flap_window_s`` without any.
        """
        fresh = self._accusations and now - self._accusations[-1] <= self._policy.flap_window_s
        if node != self._accused or not fresh:
            self._accused, self._accusations = node, []
        self._accusations.append(now)
        if len(self._accusations) >= self._policy.accusations:
            self.cool(node, now)
            self._accusations = []

    def quarantined(self, now: float) -> dict[str, float]:
        """Name or id -> until when."""
        return {node: until for node, until in self._until.items() if now < until}

    def cool(self, node: str, now: float) -> None:
        """Leave this node out for ``quarantine_s``. ``node`` is a name, or an id where the node
        lives on: several agents of one machine may have one name."""
        self._until[node] = now + self._policy.quarantine_s

    def _forget(self, now: float) -> None:
        # Names of nodes that come and go for weeks must not pile up.
        horizon = now - self._policy.flap_window_s
        self._losses = {n: t for n, t in self._losses.items() if t[-1] >= horizon}
        self._until = self.quarantined(now)
