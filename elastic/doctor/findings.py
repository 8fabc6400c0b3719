"""The result type of every check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

HEALTHY, UNHEALTHY = 0, 1


class Status(str, Enum):
    """The verdict of one check."""

    OK = "ok"
    WARNING = "warning"  # training works, but not optimally
    FAILED = "failed"
    SKIPPED = "skipped"  # does not apply here; ``measured`` has the reason


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check's verdict, the measured value, and the remedy if it is not good."""

    name: str
    status: Status
    measured: str
    remedy: str = ""
    node: str = ""  # "": all nodes, or the only one

    def __post_init__(self) -> None:
        assert self.remedy or self.status in (Status.OK, Status.SKIPPED), self


def ok(name: str, measured: str) -> Finding:
    return Finding(name=name, status=Status.OK, measured=measured)


def skipped(name: str, why: str) -> Finding:
    return Finding(name=name, status=Status.SKIPPED, measured=why)


def warning(name: str, measured: str, remedy: str) -> Finding:
    return Finding(name=name, status=Status.WARNING, measured=measured, remedy=remedy)


def failed(name: str, measured: str, remedy: str) -> Finding:
    return Finding(name=name, status=Status.FAILED, measured=measured, remedy=remedy)


def exit_code(findings: Iterable[Finding]) -> int:
    """The verdict as an exit code: warnings and skipped checks do not fail a machine.

    >>> exit_code([ok("etcd", "reachable"), warning("MTU", "900", "raise it")])
    0
    >>> exit_code([failed("etcd", "refused", "start it")])
    1
    """
    found_failure = any(finding.status is Status.FAILED for finding in findings)
    return UNHEALTHY if found_failure else HEALTHY


def summary(findings: Iterable[Finding]) -> str:
    """The counts as a sentence.

    >>> summary([ok("etcd", "reachable"), ok("MTU", "1500"), skipped("GPU", "none")])
    '2 ok, 1 skipped: healthy'
    """
    found = list(findings)
    counts = [(status, sum(f.status is status for f in found)) for status in Status]
    parts = ", ".join(f"{count} {status.value}" for status, count in counts if count)
    verdict = "healthy" if exit_code(found) == HEALTHY else "NOT healthy"
    return f"{parts or 'no checks'}: {verdict}"
