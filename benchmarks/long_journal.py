"""Journals of a simulated long run, for benchmarks/telemetry.py: a million events.

Sixteen nodes with four workers each. Every worker sums up its time every 5 s (``rank-times``), rank
0 writes what the script measures, a checkpoint is saved every tenth window, and at regular
intervals the run loses a node, which comes back in the world after.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NODES, WORKERS = 16, 4
_WINDOW_S, _STEPS = 5.0, 50
_RECOVERY_S = 4.0
_START_S = 1.7e9


class _Writer:
    def __init__(self, folder: Path, node: int, local_rank: int | None) -> None:
        name, role = f"node-{node:02}", "agent" if local_rank is None else "worker"
        process = "agent" if local_rank is None else local_rank
        self._file = (folder / f"{name}-{process}.jsonl").open("w")
        self._node, self._seq = name, 0
        self._writer = f"{node:04x}{local_rank if local_rank is not None else 'a'}"
        self._rank = {} if local_rank is None else {"rank": node * WORKERS + local_rank}
        self.write(
            0.0,
            "journal-opened",
            schema=1,
            role=role,
            run_id="long",
            pid=node,
            host=name,
            boot_id=f"boot-{node}",
            library="0",
        )

    def write(self, at_s: float, event: str, **more: Any) -> None:
        line = {
            "event": event,
            "seq": self._seq,
            "time": _START_S + at_s,
            "monotonic": 1e5 + at_s,
            "writer": self._writer,
            "node": self._node,
            **self._rank,
            **more,
        }
        self._seq += 1
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> int:
        self._file.close()
        return self._seq


def write_journals(folder: Path, events: int, worlds: int) -> int:
    """About ``events`` lines over so many worlds; how many there are."""
    agents = [_Writer(folder, node, None) for node in range(NODES)]
    workers = [_Writer(folder, node, n) for node in range(NODES) for n in range(WORKERS)]
    windows = max(3, int(events / (len(workers) + 7.5)) // worlds)
    at_s, step = 20.0, 0
    for generation in range(1, worlds + 1):
        _form(agents[0], at_s, generation)
        for worker in workers:
            place = {"generation": generation, "step": step}
            worker.write(at_s + 1, "world-joined", size=64, source=0, duration_s=0.2, **place)
            if generation > 1:
                worker.write(at_s + 1.5, "recovered", **_recovery(), **place)
        for number, (begin_s, line) in enumerate(_windows(at_s + 1.5, step, generation, windows)):
            for worker in workers:
                worker.write(begin_s + line["duration_s"], "rank-times", **line)
            _beside(workers[0], begin_s, line, number)
        for worker in workers:
            if generation < worlds:
                error = "RuntimeError: connection closed by peer"
                worker.write(
                    begin_s + 8, "world-fault", generation=generation, step=step, error=error
                )
        at_s, step = begin_s + 8 + _RECOVERY_S, line["step"]
    for worker in workers:
        worker.write(at_s, "run-closed", clean=True, error="", generation=worlds)
    for agent in agents:
        agent.write(at_s, "job-ended", outcome="success", reason="done", exit_code=0)
    return sum(writer.close() for writer in (*agents, *workers))


def _form(agent: _Writer, at_s: float, generation: int) -> None:
    agent.write(
        at_s,
        "world-formed",
        generation=generation,
        nodes=[f"node-{n:02}" for n in range(NODES)],
        size=NODES * WORKERS,
        state="active",
        mode="in-process",
        cause="first" if generation == 1 else "lost",
        reason="node-07 was lost",
    )


def _recovery() -> dict[str, float]:
    laps = {"leave_s": 0.5, "wait_s": 1.5, "build_s": 1.0, "agree_s": 0.5, "wrap_s": 0.5}
    return {"duration_s": sum(laps.values()), "paused_s": 0.0, **laps}


def _windows(
    at_s: float, step: int, generation: int, count: int
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Of one worker in one world: the first step, then full windows, then one with a fault."""
    for number in range(count):
        is_first, is_last = number == 0, number == count - 1
        took_s, steps = (1.0, 1) if is_first else (_WINDOW_S, _STEPS)
        step += steps
        open_s = 0.4 if is_last else 0.0
        ended = "first-step" if is_first else "fault" if is_last else "due"
        yield (
            at_s,
            {
                "generation": generation,
                "step": step,
                "steps": steps,
                "duration_s": took_s,
                "productive_s": round(took_s - open_s - 0.3, 6),
                "data_s": 0.2,
                "checkpoint_s": 0.1,
                "evaluation_s": 0.0,
                "open_s": open_s,
                "collective_s": 0.512345,
                "ended": ended,
            },
        )
        at_s += took_s


def _beside(worker: _Writer, begin_s: float, line: dict[str, Any], number: int) -> None:
    """What rank 0 writes in a window."""
    place = {"generation": line["generation"]}
    for part in range(7):
        measured = line["step"] - line["steps"] + part * line["steps"] // 7 + 1
        values = {"loss": 2.0 / (1 + measured / 1e4), "lr": 1e-3}
        at_s = begin_s + part * line["duration_s"] / 7
        worker.write(at_s, "metrics", step=measured, values=values, **place)
    if number % 10 == 9:
        worker.write(
            begin_s + 1,
            "checkpoint-saved",
            name=f"step-{line['step']}",
            step=line["step"],
            duration_s=1.2,
            stall_s=0.1,
            bytes=1 << 30,
            **place,
        )
