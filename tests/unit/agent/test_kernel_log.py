"""The kernel log as evidence of a worker's failure: read since its start, bounded, and judged."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from kit.failure_corpus import CORPUS, name_of
from kit.manual_clock import ManualClock
from test_worker_deaths import Context

from elastic.agent.kernel_log import KernelLog, KernelLogExcerpt
from elastic.agent.node import NodeContext
from elastic.agent.workers import Workers
from elastic.hangs import kernel
from elastic.link.link import ClientHandshakeRequest, Ready, Worker, WorkerDeath
from elastic.membership.failures import RULES, Action, FailureFacts, is_consequence, judge_failure
from elastic.telemetry.events import Event, WorkerDied

# Recorded: https://github.com/NVIDIA/NVSentinel/issues/155, tranX/issues/41, crucible/issues/1844
XID_79 = "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus"
OOM = (
    "Out of memory: Killed process {} (python3) total-vm:53312244kB, anon-rss:31451456kB, "
    "file-rss:74816kB, shmem-rss:12296kB, UID:0 pgtables:69068kB oom_score_adj:0"
)
DISK = "I/O error, dev nvme0n1, sector 131209936 op 0x0:(READ) flags 0x80700 phys_seg 25 prio class"
KILLED, MEMORY = "local rank 0", "host-out-of-memory"
LINK = "mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link DOWN"
LOST_PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.4]:1"
PID = 1 << 22


class Kmsg:
    """A file with the format of /dev/kmsg."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "kmsg"
        self.path.write_text("4,1,500,-;NVRM: Xid (PCI:0000:01:00): 79, of the boot before\n")
        self._number = 1

    def say(self, *lines: str) -> None:
        with self.path.open("a") as log:
            for line in lines:
                self._number += 1
                log.write(f"4,{self._number},{self._number}000000,-;{line}\n SUBSYSTEM=pci\n")


@pytest.fixture
def kmsg(tmp_path: Path) -> Kmsg:
    return Kmsg(tmp_path)


@pytest.fixture
def log(kmsg: Kmsg) -> Iterator[KernelLog]:
    with closing(KernelLog(kmsg.path)) as log:
        log.mark()
        yield log


def test_lines_from_before_the_start_of_the_workers_are_ignored(kmsg: Kmsg, log: KernelLog) -> None:
    assert log.excerpt() == KernelLogExcerpt()
    kmsg.say("eth0: renamed from veth1", XID_79)
    assert log.excerpt().lines == (XID_79,)
    assert log.excerpt().lines == (XID_79,), "also for the next worker of the same start"
    log.mark()
    assert log.excerpt() == KernelLogExcerpt()


def test_the_relevant_line_is_found_among_many(kmsg: Kmsg, log: KernelLog) -> None:
    kmsg.say(LINK, XID_79, *(f"nfs: server a not responding, {n}" for n in range(2000)))
    lines = log.excerpt().lines
    assert XID_79 in lines and len(lines) <= 10
    kmsg.say(XID_79 + "x" * 10_000)
    assert max(map(len, log.excerpt().lines)) <= 300


def test_reading_a_long_log_is_limited_in_time(kmsg: Kmsg) -> None:
    """The node's thread waits for the read, so that it is limited by the clock."""

    class Running(ManualClock):
        def monotonic(self) -> float:
            self.advance(0.08)
            return super().monotonic()

    with closing(KernelLog(kmsg.path, Running())) as log:
        log.mark()
        kmsg.say(*("Buffer I/O error on dev sda, logical block 1" for _ in range(5000)), XID_79)
        assert XID_79 not in log.excerpt().lines
        looks = range(1000)  # each read continues where the last one ended
        assert any(XID_79 in log.excerpt().lines for _ in looks)


def test_an_unreadable_kernel_log_is_reported_with_the_reason(tmp_path: Path) -> None:
    log = KernelLog(tmp_path / "kmsg")
    log.mark()
    said = log.excerpt()
    assert said.lines == () and "cannot be read" in str(said) and "No such file" in str(said)
    assert not said.has_killed(1)
    log.close()
    (tmp_path / "kmsg").write_text("")
    log.mark()  # it is readable by now
    assert log.excerpt() == KernelLogExcerpt()
    log.close()


def test_the_kernel_log_of_this_machine_is_read_without_waiting() -> None:
    with closing(KernelLog()) as log:
        log.mark()
        assert isinstance(log.excerpt(), KernelLogExcerpt)


def test_a_hang_report_explains_a_missing_kernel_log(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> list[str]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(kernel, "_kernel_log", refused)
    assert "cannot be read: Operation not permitted" in kernel.describe_node()["kernel log"]


@pytest.mark.parametrize("example", [e for e in CORPUS if "kernel_log" in e], ids=name_of)
def test_every_line_that_matches_a_rule_is_in_the_excerpt(
    kmsg: Kmsg, log: KernelLog, example: dict[str, Any]
) -> None:
    kmsg.say(*example["kernel_log"])
    known = [
        line
        for line in example["kernel_log"]
        if any(rule.kernel_pattern.search(line) for rule in RULES)
    ]
    assert set(known) <= set(log.excerpt().lines)


# ── verdicts ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "exit_code", "line", "action", "rule"),
    [
        (None, -9, XID_79, Action.EXCLUDE_NODE, "gpu-hardware"),
        ("ValueError: nan", 1, XID_79, Action.EXCLUDE_NODE, "gpu-hardware"),
        (LOST_PEER, 1, XID_79, Action.EXCLUDE_NODE, "gpu-hardware"),
        ("rank 1 on n2 hangs in a collective", 1, XID_79, Action.EXCLUDE_NODE, "gpu-hardware"),
        ("SyntaxError: invalid syntax", 1, XID_79, Action.STOP, "script-cannot-run"),
        (None, 2, XID_79, Action.STOP, "wrong-usage"),
        (None, -7, DISK, Action.EXCLUDE_NODE, "disk"),
        (LOST_PEER, 1, DISK, Action.EXCLUDE_NODE, "disk"),
        ("CUDA out of memory", 1, DISK, Action.RESTART, "gpu-out-of-memory"),
        (f"{KILLED} (pid 7) was ended by SIGKILL", -9, OOM.format(7), Action.RESTART, MEMORY),
        (f"{KILLED} (pid 7) was ended by SIGKILL", -9, OOM.format(8), Action.RESTART, "signal"),
        (None, -9, OOM.format(7), Action.RESTART, "signal"),  # perhaps of another job
        ("ValueError: nan", 1, OOM.format(7), Action.RESTART, "unknown"),
        (None, -9, LINK, Action.RESTART, "signal"),
    ],
)
def test_the_verdict_uses_the_kernel_log_and_the_error(
    text: str | None, exit_code: int, line: str, action: Action, rule: str
) -> None:
    facts = FailureFacts(text=text, exit_code=exit_code, works_elsewhere=True, kernel_log=(line,))
    verdict = judge_failure(facts)
    assert (verdict.action, verdict.rule) == (action, rule)
    assert verdict.evidence.startswith("kernel log: ") is (rule in line_rules(line))


def line_rules(line: str) -> tuple[str, ...]:
    return {XID_79: ("gpu-hardware",), DISK: ("disk",), LINK: ()}.get(line, ("host-out-of-memory",))


def test_a_disk_error_excludes_no_node_before_the_job_worked_elsewhere() -> None:
    facts = FailureFacts(exit_code=-7, kernel_log=(DISK,))
    assert judge_failure(facts).action is Action.RESTART


def test_a_failure_explained_by_the_kernel_is_not_a_consequence() -> None:
    """The leader takes the first failure that is not a consequence for the origin."""
    assert is_consequence(LOST_PEER)
    assert not is_consequence(LOST_PEER, (XID_79,))
    assert is_consequence(LOST_PEER, (OOM.format(7),))


# ── the agent ──────────────────────────────────────────────────────────────────────────────


class Journal:
    def __init__(self) -> None:
        self.died: list[WorkerDied] = []

    def emit(self, event: Event, *, level: int = 0) -> None:
        if isinstance(event, WorkerDied):
            self.died.append(event)


class Agent:
    """An agent with a worker in its training loop, and this kernel log."""

    def __init__(self, log: KernelLog) -> None:
        self.context, self.journal = Context(), Journal()
        self.context.kernel_log = log
        self.context.journal = self.journal  # type: ignore[assignment]
        self.workers = Workers(cast(NodeContext, self.context))
        self.worker = Worker(pid=PID, local_rank=0, token=1)
        self.workers.on_message(
            self.worker, ClientHandshakeRequest(version=1, pid=PID, local_rank=0, library="1")
        )
        self.workers.on_message(self.worker, Ready())

    def ends(self, code: int | None, signum: int | None) -> None:
        self.workers.on_ended(self.worker, WorkerDeath(PID, code, signum, None))


def test_the_node_record_has_the_kernel_log_excerpt(kmsg: Kmsg, log: KernelLog) -> None:
    agent = Agent(log)
    kmsg.say(XID_79)
    agent.ends(None, signal.SIGABRT)
    node = agent.context.status.node
    assert node.failure_kernel_log == (XID_79,)
    assert [event.kernel_log for event in agent.journal.died] == [XID_79]
    assert not node.failure_is_oom_kill


def test_the_record_of_a_killed_hung_worker_has_the_excerpt(kmsg: Kmsg, log: KernelLog) -> None:
    agent = Agent(log)
    kmsg.say(XID_79)
    agent.workers.is_hung(PID, "rank 0 hangs")
    agent.ends(None, signal.SIGKILL)
    node = agent.context.status.node
    assert (node.failure, node.failure_kernel_log) == ("hang: rank 0 hangs", (XID_79,))


@pytest.mark.parametrize("is_in_container", [False, True])
def test_an_oom_kill_is_attributed_by_process_id(
    kmsg: Kmsg, log: KernelLog, monkeypatch: pytest.MonkeyPatch, is_in_container: bool
) -> None:
    """In a container, the process ids in the log are those of the host, and are not comparable."""
    own = os.stat("/proc/self/ns/pid").st_ino
    first = own + is_in_container
    monkeypatch.setattr("elastic.agent.kernel_log._FIRST_PID_NAMESPACE", first)
    agent = Agent(log)
    kmsg.say(OOM.format(PID + 1))
    assert not log.excerpt().has_killed(PID)
    kmsg.say(OOM.format(PID))
    agent.ends(None, signal.SIGKILL)
    assert agent.context.status.node.failure_is_oom_kill is not is_in_container


def test_the_next_start_discards_the_excerpt(kmsg: Kmsg, log: KernelLog) -> None:
    """As NodeService does before it starts workers: marks the log again."""
    agent = Agent(log)
    kmsg.say(XID_79)
    agent.ends(1, None)
    agent.context.status.change_node(lambda n: replace(n, failure_kernel_log=()))
    log.mark()
    assert log.excerpt() == KernelLogExcerpt()
