"""The verdict on one failure, with its evidence: a pure function of a worker's error.

Most failures are transient, or the consequence of another node's: the world restarts, and the
failure budget limits how often. Two kinds do not justify a restart. Some errors belong to a machine
(a GPU with uncorrectable memory errors, a file system that has become read-only): another attempt
on that node fails again, so it is quarantined. Others belong to the script or its input (a syntax
error, an invalid flag): every attempt on any node fails again, so the job stops with that error.
"""

from __future__ import annotations

import functools
import re
import signal
from dataclasses import dataclass

from elastic.failures.rules import REFUSED, RULES, Action, Confidence, Rule
from elastic.tracebacks import exception_of, exception_type

_EVIDENCE = 200  # characters of the line that a rule matched
_REFUSAL = 1000  # characters of a message of this library with its hint
_WRONG_USAGE = 2  # argparse's exit code
HANG = "hang: "  # begins an agent's sentence about a worker that it has ended for a hang
# Sentences of this library about a worker's end. They name no cause that a rule could find.
_OURS = re.compile(
    rf"{HANG}|the script called sys\.exit\("
    r"|local rank \d+ \(pid \d+\) (was ended|ended|disappeared)"
)
# Never raised by a broken connection, whatever the message.
_OF_THE_SCRIPT = frozenset(
    kind.__name__
    for kind in (
        ArithmeticError, AssertionError, AttributeError, ImportError, IndexError, KeyError,
        LookupError, NameError, NotImplementedError, OverflowError, RecursionError, TypeError,
        UnboundLocalError, UnicodeDecodeError, ValueError, ZeroDivisionError,
    )
) | {"FileNotFoundError", "ModuleNotFoundError"}  # fmt: skip
_OOM_KILL = re.compile(r"(?:killed process |\boom-kill:.*\bpid=)(\d+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class FailureFacts:
    """The facts about a failed worker.

    ``text`` is its error, or the end of its log. ``exit_code`` is negative for a signal, as in
    Python's subprocess module. ``is_oom_kill``: the kernel killed a process of its cgroup for lack
    of memory at that time. ``works_elsewhere``: workers of this job have trained on another node,
    so a missing resource is not missing everywhere; False if all of them fail like this one.
    ``kernel_log``: lines since the workers of its node were started.
    """

    text: str | None = None
    exit_code: int | None = None
    is_oom_kill: bool = False
    works_elsewhere: bool = False
    kernel_log: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FailureVerdict:
    """``reason`` is a sentence for users, ``evidence`` the matching line or code."""

    action: Action
    rule: str
    confidence: Confidence
    reason: str
    evidence: str

    def __str__(self) -> str:
        if self.rule == REFUSED:  # its last line is the hint
            return f"{self.reason}: {self.evidence}"
        return f"{self.reason} ({self.evidence})" if self.evidence else self.reason


def judge_failure(facts: FailureFacts) -> FailureVerdict:
    """The verdict on a failed worker. Equal facts give equal verdicts.

    The first matching rule of :data:`~elastic.failures.rules.RULES` applies, and within it the last
    matching line of the text: the last line of a traceback is the exception itself.
    """
    if facts.is_oom_kill:
        return _verdict(
            Action.RESTART,
            "host-out-of-memory",
            Confidence.HIGH,
            "the kernel killed it, or a process of its data loader, because its memory limit was "
            "reached; raise the limit, or lower the number of data workers",
            _exit_evidence(facts),
        )
    text = facts.text or ""
    if text.startswith(HANG):
        return _verdict(
            Action.RESTART,
            "hang",
            Confidence.MEDIUM,
            "it made no progress, and was ended",
            text.removeprefix(HANG)[:_EVIDENCE],
        )
    matched = _first_match(text)
    if (found := _in_kernel_log(facts, matched)) is not None:
        rule, line = found
        return _by_rule(rule, facts, f"kernel log: {line}"[:_EVIDENCE])
    if matched is not None:
        rule, line = matched
        # The hint of a refusal states what to do.
        evidence = exception_of(text)[:_REFUSAL] if rule.name == REFUSED else line[:_EVIDENCE]
        return _by_rule(rule, facts, evidence)
    return _by_exit_code(facts)


def _in_kernel_log(
    facts: FailureFacts, matched: tuple[Rule, str] | None
) -> tuple[Rule, str] | None:
    """The cause according to the kernel, if the worker's own text does not contain it.

    An error of the script remains one, whatever else has happened on its machine. A definite fault
    of the machine explains any other failure; one that may not have affected this process explains
    only an otherwise unexplained failure. An event about one process (an OOM kill, a fault of the
    script's kernels on a GPU) explains only the failure of a process without its own error text.
    """
    by_text = matched[0] if matched is not None else None
    is_script_error = by_text is not None and by_text.action is Action.STOP
    if not facts.kernel_log or is_script_error or _is_wrong_usage(facts):
        return None
    is_unexplained = by_text is None or by_text.is_consequence
    for rule in RULES:
        if rule is by_text:
            return None  # the worker's text states the same cause
        for line in reversed(facts.kernel_log):
            if not rule.kernel_pattern.search(line) or _is_about_another(line, facts):
                continue
            is_machine = rule.action is Action.EXCLUDE_NODE
            if is_machine and (is_unexplained or rule.confidence is Confidence.HIGH):
                return rule, line
            if not is_machine and is_unexplained and not _has_own_error(facts):
                return rule, line
    return None


def _is_about_another(line: str, facts: FailureFacts) -> bool:
    """Whether a line reports an OOM kill of a process that the worker's text does not name: that of
    another job on the machine. (In a container, the log has other process ids. There, the count of
    the cgroup is evidence.)"""
    killed = _OOM_KILL.search(line)
    return killed is not None and f"(pid {killed[1]})" not in (facts.text or "")


def _has_own_error(facts: FailureFacts) -> bool:
    """Whether the process ended on its own: with an error that is not a peer's."""
    is_signal = facts.exit_code is not None and facts.exit_code < 0
    has_text = bool(facts.text) and not _is_ours(facts.text)
    return not is_signal and has_text and not is_consequence(facts.text)


def _is_wrong_usage(facts: FailureFacts) -> bool:
    has_text = bool((facts.text or "").strip()) and not _is_ours(facts.text)
    return facts.exit_code == _WRONG_USAGE and not has_text


def _is_ours(text: str | None) -> bool:
    return _OURS.match(exception_of(text or "")) is not None


def is_consequence(text: str | None, kernel_log: tuple[str, ...] = ()) -> bool:
    """Whether a worker's error only states that a peer is gone or does not respond, and the
    kernel's log of its node shows no fault of the machine.

    Decided by the same rule as its verdict.

    >>> is_consequence("RuntimeError: Connection closed by peer [127.0.0.1]:4711")
    True
    >>> is_consequence("ImportError: libnccl.so.2: cannot open shared object file")
    False
    """
    matched = _first_match(text or "")
    if matched is None or not matched[0].is_consequence:
        return False
    found = _in_kernel_log(FailureFacts(text=text, kernel_log=kernel_log), matched)
    return found is None or found[0].action is not Action.EXCLUDE_NODE


# Evaluated again in every iteration of a waiting leader.
@functools.lru_cache(maxsize=128)
def _first_match(text: str) -> tuple[Rule, str] | None:
    if _is_ours(text):
        return None
    lines = [line.strip() for line in exception_of(text).splitlines() if line.strip()]
    is_of_script = exception_type(text) in _OF_THE_SCRIPT
    for rule in RULES:
        if rule.is_consequence and is_of_script:
            continue
        for line in reversed(lines):
            if rule.pattern.search(line):
                return rule, line
    return None


def _by_rule(rule: Rule, facts: FailureFacts, line: str) -> FailureVerdict:
    action, reason = rule.action, rule.reason
    if rule.restarts_if_others_work and facts.works_elsewhere:
        action = Action.RESTART
    elif rule.is_local and action is Action.STOP and facts.works_elsewhere:
        # The same script runs on other nodes: this one differs from them.
        action = Action.EXCLUDE_NODE
        reason = f"{reason}, but not on other nodes of this job"
    elif rule.is_local and action is Action.EXCLUDE_NODE and not facts.works_elsewhere:
        # No node has worked so far: excluding one after the other would hide a common cause.
        action = Action.RESTART
    return _verdict(action, rule.name, rule.confidence, reason, line)


def _by_exit_code(facts: FailureFacts) -> FailureVerdict:
    code = facts.exit_code
    evidence = _exit_evidence(facts)
    if _is_wrong_usage(facts):
        return _verdict(
            Action.STOP,
            "wrong-usage",
            Confidence.MEDIUM,
            "the script rejected its arguments",
            evidence,
        )
    if code == -signal.SIGILL and facts.works_elsewhere:
        return _verdict(
            Action.EXCLUDE_NODE,
            "illegal-instruction",
            Confidence.MEDIUM,
            "its processor lacks an instruction that the binaries use, or is faulty",
            evidence,
        )
    if code == -signal.SIGABRT:
        # gloo/transport/tcp/pair.cc: the message is larger than the one expected.
        return _verdict(
            Action.RESTART,
            "abort",
            Confidence.MEDIUM,
            "an assertion in C++ failed, whose text is on its stderr; on gloo also a collective "
            "that other ranks call with another size, or not at all",
            evidence,
        )
    if code == -signal.SIGBUS:
        return _verdict(
            Action.RESTART,
            "bus-error",
            Confidence.MEDIUM,
            "shared memory (/dev/shm) is full, or a mapped file was truncated",
            evidence,
        )
    if code is not None and code < 0:
        return _verdict(Action.RESTART, "signal", Confidence.MEDIUM, "a signal ended it", evidence)
    return _verdict(
        Action.RESTART, "unknown", Confidence.LOW, "no rule matches; it may be transient", evidence
    )


def _exit_evidence(facts: FailureFacts) -> str:
    code = facts.exit_code
    if code is None:
        return ""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _verdict(
    action: Action, rule: str, confidence: Confidence, reason: str, evidence: str
) -> FailureVerdict:
    return FailureVerdict(
        action=action, rule=rule, confidence=confidence, reason=reason, evidence=evidence
    )
