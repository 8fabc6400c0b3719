"""A small world: workers of one script, forked from a warm process, under a simulated agent.

A real cluster (:mod:`elastic.testing.cluster`) takes seconds, a small world tenths of a second. The
workers are real: their script runs as under torchrun, with our link, and after a death the others
recover with the production code. The agents are simulated by one process, without etcd and torchrun
(:mod:`elastic.testing.small_world.host`).

    with SmallWorld() as world:
        alone = world.run("train.py", tmp_path / "alone", size=1)
        outcome = world.run("train.py", tmp_path / "killed", death=Death(rank=1, event=57))
        outcome.assert_success()

A script leaves its result as ``result``, a dict of tensors or numbers, at module level.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import load_file

from elastic.testing.forks.program import start_python

LINES, CALLS = "lines", "calls"
RECOVER, STOP, WAIT = "recover", "stop", "wait"


@dataclass(frozen=True, kw_only=True)
class Death:
    """The place where a worker kills itself with SIGKILL.

    Events are lines of the script, or calls of any Python function, that run within ``run.retry``
    (or an attempt), outside of which a fault ends the process. Counted from 1. A script without
    ``run.retry`` has events from its first world on.
    """

    rank: int  # in the first world; a replacement has the next free number
    event: int
    counted: str = LINES
    line: int = 0  # count only executions of this line of the script
    file: str = ""  # of the line, if it is a module of the script
    world: int = 1  # count from this world on; a later one begins with the end of its predecessor


@dataclass(frozen=True, kw_only=True)
class WorkerResult:
    """The result of one process."""

    name: str
    pid: int
    exit_code: int | None  # None: ended by a signal
    steps: int  # with one that its end commits; -1 if it failed
    lines: int  # of the script that ran within retry; counted only without a death
    calls: int
    executions: dict[int, int]  # of each line, likewise
    elsewhere: dict[str, int]  # of each FILE:LINE of a checked script's modules
    result: dict[str, torch.Tensor]
    error: str  # the exception that ended it, with its type
    line: int  # of the script, in which it was raised; 0: not known
    record: Mapping[str, Any]  # of a checked script
    log: str

    @property
    def has_succeeded(self) -> bool:
        return self.exit_code == 0


_UNREAD = "are not searched for"  # elastic/train/changes.py


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """The results of a run."""

    workers: tuple[WorkerResult, ...]  # by their first rank; a replacement comes last
    worlds: int  # formed
    problem: str  # why the host has ended the run; "" if it has not
    died_at: str  # the line where the victim killed itself, as text; "": none did

    @property
    def survivors(self) -> tuple[WorkerResult, ...]:
        """The workers with a result."""
        return tuple(worker for worker in self.workers if worker.has_succeeded)

    def assert_success(self, *, workers: int) -> None:
        """Check that exactly ``workers`` workers succeeded, and that each has been able to read the
        script. Raises AssertionError with all logs."""
        problem = self.problem
        if not problem and len(self.survivors) != workers:
            problem = "wrong number of successes"
        if not problem and any(_UNREAD in worker.log for worker in self.workers):
            problem = "the script could not be read"
        if problem:
            raise AssertionError(f"{problem}\n{self.describe()}")

    def describe(self) -> str:
        """The ends of all logs."""
        where = f"died at {self.died_at}\n" if self.died_at else ""
        return where + "\n".join(
            f"--- {w.name}: exit code {w.exit_code}, {w.steps} steps\n{w.log[-6000:]}"
            for w in self.workers
        )


class SmallWorld:
    """The host process, forked from the tests' shared server: importing torch takes seconds.

    ``prepare`` names a function without arguments that each worker calls before its script, as
    ``"package.module:function"``: to choose a device or a backend, for example. ``imports``:
    modules that the host imports for all of its workers. ``start``: how to start the host, as by
    subprocess.Popen.
    """

    def __init__(
        self,
        *,
        prepare: str = "",
        imports: Sequence[str] = (),
        start: Callable[..., subprocess.Popen[Any]] = start_python,
    ) -> None:
        self._prepare = prepare
        self._host = start(
            [sys.executable, "-m", "elastic.testing.small_world.host", *imports],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> SmallWorld:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the host. Idempotent."""
        for stream in (self._host.stdin, self._host.stdout):
            if stream is not None and not stream.closed:
                stream.close()
        self._host.wait()

    def run(
        self,
        script: str | Path,
        folder: Path,
        *,
        size: int = 3,
        per_node: int = 1,
        arguments: Sequence[str] = (),
        death: Death | None = None,
        later_deaths: Sequence[Death] = (),
        is_replaced: bool = False,
        is_counted: bool = True,
        on_death: str = RECOVER,
        limit_s: float = 120.0,
        environment: Mapping[str, str] | None = None,
        record: Mapping[str, Any] | None = None,
    ) -> RunOutcome:
        """Run ``script`` to its end.

        ``size`` 1 is plain ``python script``: no agent, no link. ``per_node``: workers of a node;
        if one of several dies, the others of its node die with it, as the ranks of a replica do.
        ``arguments`` are the script's. After a death the other nodes continue alone, or with a
        replacement of the dead one. ``is_counted``: count lines and calls, if nobody dies, which
        costs a third of the time. ``on_death``: RECOVER, or STOP, which kills all workers at
        once, or WAIT, as in restart mode: the others end by themselves, unless all of them change
        worlds in process, as in run.once outside of run.retry; then the dead one is replaced.
        ``folder``: for logs and results. ``environment``: additional variables of the script.
        ``record``: how to record it, a
        :class:`~elastic.testing.small_world.recording.RecordOrder` as a dict; the script
        leaves no result then.
        """
        folder.mkdir(parents=True, exist_ok=True)
        order = {
            "script": str(script),
            "folder": str(folder),
            "size": size,
            "per_node": per_node,
            "arguments": list(arguments),
            "deaths": [asdict(d) for d in (death, *later_deaths) if d is not None],
            "is_replaced": is_replaced,
            "is_counted": is_counted,
            "on_death": on_death,
            "limit_s": limit_s,
            "prepare": self._prepare,
            "environment": dict(environment or {}),
            "record": None if record is None else dict(record),
        }
        stdin, stdout = self._host.stdin, self._host.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps(order) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"the host of the small world has ended: {self._host.wait()}")
        return _outcome(json.loads(line), folder)


def _outcome(answer: dict[str, Any], folder: Path) -> RunOutcome:
    notes = sorted(folder.glob("death-*.json"), key=lambda note: note.stat().st_mtime_ns)
    died_at = "; ".join(json.loads(note.read_text()) for note in notes)
    workers = tuple(_worker(w, folder) for w in answer["workers"])
    return RunOutcome(
        workers=workers, worlds=answer["worlds"], problem=answer["problem"], died_at=died_at
    )


def _worker(facts: dict[str, Any], folder: Path) -> WorkerResult:
    name = facts["name"]
    log, report, result = (folder / f"{name}.{kind}" for kind in ("log", "json", "safetensors"))
    numbers = json.loads(report.read_text()) if report.exists() else {}
    return WorkerResult(
        name=name,
        pid=facts["pid"],
        exit_code=facts["exit_code"],
        steps=numbers.get("steps", -1),
        lines=numbers.get(LINES, 0),
        calls=numbers.get(CALLS, 0),
        executions={int(line): count for line, count in numbers.get("executions", {}).items()},
        elsewhere=numbers.get("elsewhere", {}),
        result=load_file(result) if result.exists() else {},
        error=numbers.get("error", ""),
        line=numbers.get("line", 0),
        record=numbers.get("record", {}),
        log=log.read_text(errors="replace") if log.exists() else "",
    )
