"""A worker of a small world: a fork of the host that becomes the process of a script.

Everything here runs in the child. It never returns.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import os
import pkgutil
import random
import runpy
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from safetensors.torch import save_file

from elastic.testing.small_world.recording import LimitReached, Recording, RecordOrder
from elastic.testing.small_world.world import CALLS, LINES, Death
from elastic.train import rollback, run

_PR_SET_PDEATHSIG = 1
_started: list[run.Components] = []


def become_worker(
    script: Path,
    folder: Path,
    name: str,
    environment: Mapping[str, str],
    *,
    arguments: Sequence[str],
    death: Death | None,
    counts: bool,
    is_joining: bool,
    prepare: str,
    record: RecordOrder | None = None,
) -> NoReturn:
    """Run the script as in a separate process, write its results, and exit."""
    code = 1
    try:
        _separate_from_the_host(folder / f"{name}.log", environment)
        rollback.copy_regardless_of_costs()
        if prepare:
            pkgutil.resolve_name(prepare)()
        recording = Recording(record, script, folder, name) if record is not None else None
        if recording is not None:
            recording.prepare()
        _watch_start(recording)
        sys.argv = [str(script), *arguments]
        note = folder / f"death-{name}.json"
        events = _Events(str(script), death, note, is_joining, counts, recording)
        code = _run(script, folder, name, events, recording)
    except BaseException:  # noqa: BLE001  printed, and the process ends with 1
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _separate_from_the_host(log: Path, environment: Mapping[str, str]) -> None:
    """Replace the host's descriptors, random state and environment."""
    os.setsid()  # torchrun makes each worker the leader of a session, too
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    atexit._clear()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.closerange(3, 1 << 16)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
    for key in list(os.environ):
        if key.startswith("ELASTIC_") or key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[key]
    os.environ.update(environment)
    torch.set_num_threads(1)  # the host's thread pool does not exist in a fork
    random.seed()
    torch.seed()  # without a seed in the script, its processes must differ
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _watch_start(recording: Recording | None) -> None:
    """Record the components that ``elastic.join()`` starts in the script."""
    original = run.start_components

    def start_components(*args: Any, **options: Any) -> run.Components:
        _started.append(original(*args, **options))
        if recording is not None:
            recording.attach(_started[-1])
        return _started[-1]

    run.start_components = start_components


def _components_of_script() -> run.Components | None:
    return _started[-1] if _started else None


def _run(
    script: Path, folder: Path, name: str, events: _Events, recording: Recording | None
) -> int:
    sys.path.insert(0, str(script.parent))
    left: dict[str, Any] | None = None
    try:
        if events.are_wanted:
            sys.settrace(events.trace)
        left = runpy.run_path(str(script), run_name="__main__")
    except BaseException as error:  # noqa: BLE001  it ends the process, as it would end python
        sys.settrace(None)
        if recording is None or not _is_success(error):
            # The log first: the host may end this process as soon as another one has failed.
            sys.excepthook(*sys.exc_info())
            report: dict[str, Any] = {"error": f"{type(error).__name__}: {error}"}
            if recording is not None:
                report |= {"line": recording.line_of(error), "record": recording.finish(None)}
            _write_json(folder / f"{name}.json", report)
            atexit._run_exitfuncs()
            return 1
    sys.settrace(None)
    _write(left, str(script), folder / name, events, recording)
    atexit._run_exitfuncs()
    return 0


def _is_success(error: BaseException) -> bool:
    if isinstance(error, SystemExit):
        return error.code in (None, 0)
    return isinstance(error, LimitReached)


def _write(
    left: dict[str, Any] | None,
    script: str,
    path: Path,
    events: _Events,
    recording: Recording | None,
) -> None:
    numbers: dict[str, Any] = {}
    if recording is None:
        result = {
            key: torch.as_tensor(value).detach().clone().contiguous()
            for key, value in (left or {}).get("result", {}).items()
        }
        save_file(result, f"{path}.part")
        os.replace(f"{path}.part", f"{path}.safetensors")
    else:
        numbers["record"] = recording.finish(left)
    parts = _components_of_script()
    steps = 0
    if parts is not None:  # one that the script has left is committed at its end
        has_begun = parts.loop.counts(parts.session.current.step)
        steps = parts.session.job.progress.step + has_begun
    numbers |= {
        "steps": steps,
        LINES: sum(events.executions.values()),
        CALLS: events.calls,
        "executions": {
            line: count for (file, line), count in events.executions.items() if file == script
        },
        "elsewhere": {
            f"{file}:{line}": count
            for (file, line), count in events.executions.items()
            if file != script
        },
    }
    _write_json(Path(f"{path}.json"), numbers)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write atomically: the host may end this process at any time if another one has failed."""
    part = path.with_suffix(".json.part")
    part.write_text(json.dumps(content))
    part.replace(path)


def _is_called_by_retry(frame: FrameType) -> bool:
    return frame.f_back is not None and frame.f_back.f_code is run.Run.retry.__code__


class _Events:
    """Counts what the script runs within retry, and ends the process at the given event."""

    def __init__(
        self,
        script: str,
        death: Death | None,
        note: Path,
        is_joining: bool,
        are_wanted: bool,
        recording: Recording | None = None,
    ) -> None:
        # Tracing costs a third of the time.
        self.are_wanted = are_wanted or death is not None or recording is not None
        self._recording = recording
        self._script = script
        self._note = note
        self._pid = os.getpid()
        self._is_joining = is_joining
        if recording is not None and recording.is_in_retry is not None:
            self._has_retry = recording.is_in_retry
        else:
            text = Path(script).read_text()
            self._has_retry = "run.retry(" in text or "attempts()" in text
        self._death = death if death and death.counted == LINES else None
        self._last_call = death.event if death and death.counted == CALLS else 0
        self._world = death.world if death is not None else 1
        self._place = (script, 0)  # the current line of the script
        self._before_death = 0  # events at lines
        self.executions: Counter[tuple[str, int]] = Counter()  # by file and line
        self.calls = 0

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        """The function for ``sys.settrace``, called for each function call."""
        # Not in a data worker, from its first call on: hooks of a fork run before any of ours.
        if os.getpid() == self._pid:
            if not self._death and self._counts():
                self.calls += 1
                if self.calls == self._last_call:
                    self._die(f"line {self._place[1]}, in {frame.f_code.co_name}")
            if self._recording is not None:
                self._recording.note_call(frame)
            elif frame.f_code.co_filename != self._script:
                return None
            if self._is_traced(frame.f_code.co_filename):
                return self._line
        return None

    def _is_traced(self, file: str) -> bool:
        """Whether a file is the script, or if it is checked, one of its modules."""
        return file == self._script or (
            self._recording is not None and self._recording.is_of_the_script(file)
        )

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and os.getpid() == self._pid:
            self._place = file, line = frame.f_code.co_filename, frame.f_lineno
            if self._counts():
                self.executions[self._place] += 1
                death = self._death
                if death and death.line in (0, line) and (death.file or self._script) == file:
                    self._before_death += 1
                    if self._before_death == death.event:
                        self._die(f"line {line}")
        elif event == "return" and self._recording is not None and _is_called_by_retry(frame):
            self._recording.note_variables(frame)
        return self._line

    def _counts(self) -> bool:
        parts = _components_of_script()
        if parts is None or (self._has_retry and not parts.session.scope.in_retry):
            return False
        lifecycle = parts.session.lifecycle
        if self._world == 1 or not lifecycle.has_world:
            return lifecycle.has_world or self._is_joining
        return lifecycle.world.generation + lifecycle.is_changing >= self._world

    def _die(self, where: str) -> None:
        sys.settrace(None)
        file, number = self._place
        line = Path(file).read_text().splitlines()[number - 1].strip()
        parts = _components_of_script()
        step = parts.session.job.progress.step if parts is not None else 0
        self._note.write_text(json.dumps(f"{where} ({line}), {step} steps committed"))
        os.kill(os.getpid(), signal.SIGKILL)
