"""Journals of a run that never was: three nodes train, one is killed, another joins."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_S = 1769860800.0  # 2026-01-31T12:00:00Z


@dataclass
class MadeUpProcess:
    """One process, which writes a journal on the clock of its node."""

    node: str
    role: str
    run_id: str = "demo"
    skew_s: float = 0.0
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.write(0.0, "journal-opened", schema=1, role=self.role, run_id=self.run_id, pid=7)

    def write(self, at_s: float, event: str, **more: Any) -> None:
        """One line, ``at_s`` seconds after the run's start."""
        line = {
            "event": event,
            "seq": len(self.lines),
            "time": START_S + at_s + self.skew_s,
            "monotonic": 5000.0 + at_s,
            "writer": f"{self.role} of {self.node}",
            "node": self.node,
            "boot_id": f"boot of {self.node}",
            **more,
        }
        self.lines.append(json.dumps(line))

    def window(self, at_s: float, took_s: float, step: int, steps: int, **more: Any) -> None:
        """What the last ``took_s`` seconds went into: steps, and 5 % waiting for data."""
        open_s = more.pop("open_s", 0.0)
        made_s = took_s - open_s
        self.write(
            at_s,
            "rank-times",
            step=step,
            steps=steps,
            duration_s=took_s,
            productive_s=0.95 * made_s,
            data_s=0.05 * made_s,
            checkpoint_s=0.0,
            evaluation_s=0.0,
            open_s=open_s,
            collective_s=0.0,
            **more,
        )

    @property
    def path(self) -> str:
        """Of its file: names may hold anything."""
        return f"{''.join(c for c in self.node if c.isalnum())[:40]}-{self.role}.jsonl"


def write_run(
    folder: Path,
    *,
    names: tuple[str, str, str, str] = ("node-0", "node-1", "node-2", "node-3"),
    run_id: str = "demo",
    skews: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    error: str = "RuntimeError: connection closed by peer",
) -> list[MadeUpProcess]:
    """120 s: start-up of 8 s, node-1 is killed after 40 s, node-3 joins after 80 s."""
    agents = [MadeUpProcess(n, "agent", run_id, s) for n, s in zip(names, skews, strict=True)]
    workers = [MadeUpProcess(n, "worker", run_id, s) for n, s in zip(names, skews, strict=True)]
    _first_world(agents, workers, names)
    _kill(agents, workers, names, error)
    _join(agents, workers, names)
    for agent in (agents[0], agents[2], agents[3]):
        agent.write(
            121.0, "job-ended", outcome="success", reason="all workers are done", exit_code=0
        )
        agent.write(121.2, "journal-closed")
    for process in (*agents, *workers):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / process.path).write_text("\n".join(process.lines) + "\n")
    return [*agents, *workers]


def _formed(
    agent: MadeUpProcess, at_s: float, generation: int, nodes: Iterable[str], cause: str, why: str
) -> None:
    members = list(nodes)
    agent.write(
        at_s,
        "world-formed",
        generation=generation,
        nodes=members,
        size=len(members),
        state="active",
        mode="in-process",
        cause=cause,
        reason=why,
    )


def _first_world(
    agents: list[MadeUpProcess], workers: list[MadeUpProcess], names: tuple[str, ...]
) -> None:
    for agent in agents[:3]:
        agent.write(1.0, "node-arrived", after_generation=0, failure=None, exit_code=None)
        agent.write(3.1, "world-entered", generation=1, first_rank=0, size=3, waited_s=2.0)
    _formed(agents[0], 3.0, 1, names[:3], "first", "3 nodes arrived")
    for rank, worker in enumerate(workers[:3]):
        place = {"rank": rank, "generation": 1}
        worker.write(8.0, "world-joined", step=0, size=3, source=None, duration_s=0.1, **place)
        worker.window(9.0, 1.0, 1, 1, ended="first-step", **place)
        for step in (10, 20, 30):
            worker.window(9.0 + step, 10.0, 1 + 10 * step // 10, 10, ended="due", **place)
    for step in range(1, 32):
        _measured(workers[0], 8.0 + step, 1, step)
    workers[0].write(
        29.0,
        "checkpoint-saved",
        name="step-20",
        step=20,
        duration_s=0.4,
        stall_s=0.02,
        bytes=1 << 20,
        rank=0,
        generation=1,
    )


def _kill(
    agents: list[MadeUpProcess],
    workers: list[MadeUpProcess],
    names: tuple[str, ...],
    error: str,
) -> None:
    agents[0].write(40.6, "node-lost", lost=names[1], reason="its agent's port is closed")
    _formed(agents[0], 41.0, 2, (names[0], names[2]), "lost", f"{names[1]} was lost")
    agents[0].write(
        41.0,
        "failure-judged",
        generation=1,
        failed=names[1],
        action="restart",
        rule="peer-lost",
        confidence="high",
        reason="its process is gone",
        evidence=error,
    )
    for rank, worker in enumerate((workers[0], workers[2])):
        place = {"rank": rank, "generation": 1}
        worker.window(40.5, 1.5, 31, 0, open_s=1.5, ended="fault", **place)
        worker.write(40.5, "world-fault", step=31, error=error, **place)
        place["generation"] = 2
        worker.write(42.0, "world-joined", step=31, size=2, source=0, duration_s=0.2, **place)
        worker.write(
            42.5,
            "recovered",
            step=31,
            duration_s=2.0,
            leave_s=0.4,
            wait_s=0.6,
            build_s=0.5,
            agree_s=0.2,
            paused_s=0.0,
            wrap_s=0.3,
            **place,
        )
        worker.window(44.0, 1.5, 32, 1, ended="first-step", **place)
        worker.window(80.0, 36.0, 68, 36, ended="change", open_s=0.2, **place)
    for step in range(32, 69):
        _measured(workers[0], 12.0 + step, 2, step)
    agents[0].write(
        60.0,
        "hang-found",
        generation=2,
        action="ended the worker",
        kind="stopped",
        ranks=[1],
        confidence="certain",
        reason="rank 1 is stopped (SIGSTOP)",
        report="/runs/hangs/g2.txt",
    )


def _join(
    agents: list[MadeUpProcess], workers: list[MadeUpProcess], names: tuple[str, ...]
) -> None:
    agents[3].write(70.0, "node-arrived", after_generation=0, failure=None, exit_code=None)
    # The leader agrees on the world while the others still train.
    _formed(agents[0], 79.0, 3, (names[0], names[2], names[3]), "joined", f"{names[3]} joined")
    for rank, worker in enumerate((workers[0], workers[2], workers[3])):
        place = {"rank": rank, "generation": 3}
        worker.write(81.0, "world-joined", step=68, size=3, source=0, duration_s=0.2, **place)
        if rank < 2:
            worker.write(
                81.2, "recovered", step=68, duration_s=1.2, wait_s=0.7, build_s=0.3, **place
            )
        worker.window(83.0, 1.8, 69, 1, ended="first-step", **place)
        worker.window(119.0, 36.0, 105, 36, ended="close", **place)
        worker.write(120.0, "run-closed", clean=True, error="", **place)
    for step in range(69, 106):
        _measured(workers[0], 14.0 + step, 3, step)


def _measured(worker: MadeUpProcess, at_s: float, generation: int, step: int) -> None:
    loss = 2.3 * math.exp(-step / 40) + 0.05 * math.sin(step)
    worker.write(
        at_s, "metrics", step=step, values={"loss": loss, "lr": 1e-3}, rank=0, generation=generation
    )
