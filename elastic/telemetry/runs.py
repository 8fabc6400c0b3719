"""The runs of this user on this machine: where each one's journals are, and which still run.

Every agent registers its run in the user's state folder, so that commands find it by its run id,
or without one if it is the only one. A run's folder there has one small file per running agent,
and its journals until they move beside its checkpoints (:meth:`Journal.move`)::

    ~/.local/state/elastic/<run id>/run.json
                                    agent-<host>-<pid>-<start time of that process>
                                    journal/<node>-<pid>.jsonl
                                    logs/<node>-<pid>.jsonl

What workers and agents write stays on the machine (:mod:`elastic.telemetry.output`): it is in
``logs``, also when the journals have moved.

Nothing here raises for an unwritable home: such a run is not listed, and has no journal until its
checkpoint folder is known.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from elastic.telemetry.files import replacing

# Value of ELASTIC_JOURNAL with which no journal is written.
NO_JOURNAL = "none"
# The folder of journals inside a checkpoint folder.
BESIDE_CHECKPOINTS = "journal"
# Ended runs in the state folder, with their journals and output, beyond which the oldest are
# removed.
MAX_RUNS = 50
MAX_BYTES = 1 << 30
# Journals of earlier starts of a node's processes, in a folder that the user has not named.
MAX_NODE_BYTES = 256 << 20

_RUN_FILE = "run.json"
_JOURNAL = "journal"


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of this package in the user's state folder (XDG base directories).

    >>> state_folder({"XDG_STATE_HOME": "/state"}).as_posix()
    '/state/elastic'
    """
    given = environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "elastic"
    return Path(environ.get("HOME") or os.devnull) / ".local" / "state" / "elastic"


def chosen_journal(environ: Mapping[str, str] = os.environ) -> str | None:
    """The journal folder that ``ELASTIC_JOURNAL`` names, if any.

    >>> chosen_journal({"ELASTIC_JOURNAL": "/shared/journal"})
    '/shared/journal'
    >>> chosen_journal({"ELASTIC_JOURNAL": "none"})
    """
    given = environ.get("ELASTIC_JOURNAL", "")
    return given if given not in ("", NO_JOURNAL) else None


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """A run with an agent of this user on this machine, now or earlier."""

    run_id: str
    journal: str  # folder; "": none is written
    endpoint: str  # of etcd
    prefix: str  # of its keys
    since_s: float  # wall time of the newest start of an agent
    script: str = ""  # the name of its file or module; "": not known
    folder: str = ""  # where it was started; "": not known
    is_running: bool = False  # an agent still runs on this machine


def script_in(command: Sequence[str]) -> str:
    """The name of the script in a worker's command line.

    >>> script_in(("/usr/bin/python3", "-u", "jobs/train.py", "--lr=1"))
    'train.py'
    >>> script_in(("./run.sh", "a"))
    'run.sh'
    """
    if not command:
        return ""
    is_python = os.path.basename(command[0]).startswith("python")
    words = (word for word in command[1:] if not word.startswith("-"))
    return os.path.basename(next(words, "") if is_python else command[0])


def while_it_runs(run_id: str) -> str:
    """The commands that show a job."""
    name = shlex.quote(run_id)
    return f"elastic status {name}, elastic events {name} -f"


def after_its_end(run_id: str, *, has_failed: bool = False) -> str:
    """The commands that show what has happened in a job.

    >>> after_its_end("llama")
    'what happened: elastic events llama; where the time went: elastic report llama'
    >>> after_its_end("llama", has_failed=True)
    'what it wrote: elastic logs llama; what happened: elastic events llama'
    """
    name = shlex.quote(run_id)
    happened = f"what happened: elastic events {name}"
    if has_failed:
        return f"what it wrote: elastic logs {name}; {happened}"
    return f"{happened}; where the time went: elastic report {name}"


class RunEntry:
    """The registration of one agent; ``journal`` is where its journals begin."""

    def __init__(self, run: LocalRun, environ: Mapping[str, str] = os.environ) -> None:
        self.run_id = run.run_id
        self._run = run
        self._is_chosen = chosen_journal(environ) is not None
        self._folder = state_folder(environ) / _quoted(run.run_id)
        self._agent = self._folder / f"agent-{_host()}-{os.getpid()}-{_start_ticks(os.getpid())}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._agent.touch()
            self._write()
        except OSError:
            return
        self._collect()
        _remove_oldest(self._folder.parent)

    def move(self, journal: Path) -> None:
        """The journals are in ``journal`` from now on."""
        self._run = LocalRun(**{**asdict(self._run), "journal": str(journal)})
        with contextlib.suppress(OSError):
            self._write()
        self._collect()

    def _collect(self) -> None:
        """Move journals to the others that processes have left in the state folder: they ended
        before they knew the checkpoint folder."""
        began, journal = self._folder / _JOURNAL, Path(self._run.journal)
        is_beside_checkpoints = journal.parent.name == BESIDE_CHECKPOINTS
        if not is_beside_checkpoints or self._is_chosen or not began.is_dir():
            return
        with contextlib.suppress(OSError):  # the user forgets the run meanwhile
            for path in began.glob("*.jsonl"):
                self._collect_one(path, journal)

    def _collect_one(self, path: Path, journal: Path) -> None:
        with contextlib.suppress(OSError, ValueError):
            if _has_ended(path) and not (journal / path.name).exists():
                # (Readers take every file with this suffix, in whatever state it is.)
                with replacing(journal / path.name) as new:
                    shutil.copyfile(path, new)
                path.unlink()

    def close(self) -> None:
        """This agent has ended."""
        self._collect()
        with contextlib.suppress(OSError):
            self._agent.unlink(missing_ok=True)

    def _write(self) -> None:
        known = {k: v for k, v in asdict(self._run).items() if k != "is_running"}
        with replacing(self._folder / _RUN_FILE) as new:
            new.write_text(json.dumps(known))


def local_runs(environ: Mapping[str, str] = os.environ) -> list[LocalRun]:
    """The runs of this user on this machine, newest first."""
    runs = (_read(folder) for folder in _folders(state_folder(environ)))
    return sorted((run for run in runs if run is not None), key=lambda run: -run.since_s)


def is_known(run_id: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an agent of this run has registered on this machine."""
    return (state_folder(environ) / _quoted(run_id) / _RUN_FILE).is_file()


def forget(run_id: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Remove the run's entry, and its journals in the state folder. False if it is unknown."""
    folder = state_folder(environ) / _quoted(run_id)
    if not folder.is_dir():
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def default_journal(run_id: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of a run's journals in the state folder."""
    return state_folder(environ) / _quoted(run_id) / _JOURNAL


def kept_output(run_id: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of what a run's workers and agents on this machine have written."""
    return state_folder(environ) / _quoted(run_id) / "logs"


def journal_beside(checkpoints: str | os.PathLike[str], run_id: str) -> Path:
    """The folder of a run's journals beside its checkpoints."""
    return Path(checkpoints) / BESIDE_CHECKPOINTS / _quoted(run_id)


def is_default(journal: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``journal`` is a run's own in the state folder: chosen by no user."""
    path = Path(journal)
    return path.name == _JOURNAL and path.is_relative_to(state_folder(environ))


def is_loopback(endpoint: str) -> bool:
    """Whether an etcd is on the machine that knows it under this endpoint.

    >>> is_loopback("127.0.0.1:2379"), is_loopback("etcd:2379")
    (True, False)
    """
    host = endpoint.rpartition("//")[2].rpartition(":")[0]
    return host in ("localhost", "[::1]") or host.startswith("127.")


def remove_oldest_files(paths: Iterable[Path], max_bytes: int) -> None:
    """Remove the files that changed first until the others have at most ``max_bytes``."""
    newest_first = sorted(((_changed_s(path), path) for path in paths), reverse=True)
    total_bytes = 0
    for _, path in newest_first:
        with contextlib.suppress(OSError):
            total_bytes += path.stat().st_size
            if total_bytes > max_bytes:
                path.unlink()


def _remove_oldest(root: Path) -> None:
    """Remove ended runs beyond the limits, oldest first."""
    total_bytes = 0
    folders = sorted(_folders(root), key=_changed_s, reverse=True)
    for number, folder in enumerate(folders):
        with contextlib.suppress(
            OSError
        ):  # another agent removes it, or it is unreadable: it stays
            total_bytes += sum(_size_bytes(path) for path in folder.glob("*/*.jsonl"))
            if (number >= MAX_RUNS or total_bytes > MAX_BYTES) and not _agents(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _folders(root: Path) -> list[Path]:
    try:
        return [path for path in root.iterdir() if path.is_dir()]
    except OSError:
        return []


def _read(folder: Path) -> LocalRun | None:
    try:
        known = json.loads((folder / _RUN_FILE).read_bytes())
        run = LocalRun(**known, is_running=bool(_agents(folder)))
        texts = (run.run_id, run.journal, run.endpoint, run.prefix, run.script, run.folder)
        is_valid = all(isinstance(t, str) for t in texts) and isinstance(run.since_s, int | float)
        return run if is_valid else None
    except (OSError, ValueError, TypeError):  # being written, or by another version
        return None


def _agents(folder: Path) -> list[Path]:
    """The files of agents that may still run; those of agents of this machine that have ended are
    removed."""
    running = []
    for path in folder.glob("agent-*"):
        host, _, process = path.name.removeprefix("agent-").rpartition("-")[0].rpartition("-")
        ticks = path.name.rpartition("-")[2]
        if host != _host():
            continue  # a home that several machines share
        if process.isdecimal() and str(_start_ticks(int(process))) == ticks:
            running.append(path)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return running


def _has_ended(journal: Path) -> bool:
    """Whether the process that wrote the journal was on this machine, and is no more."""
    with journal.open("rb") as file:
        opened = json.loads(file.readline())
    if not isinstance(opened, dict) or opened.get("host") != os.uname().nodename:
        return False
    pid = opened.get("pid")  # that of another process by now: then a later agent collects it
    return isinstance(pid, int) and _start_ticks(pid) < 0


def _start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since the boot, which distinguishes it from a later
    one with its pid; -1 if there is none."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as stat:
            return int(stat.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return -1


def _quoted(run_id: str) -> str:
    """A name of one folder for any run id.

    >>> _quoted("team/llama 7"), _quoted("..")
    ('team%2Fllama%207', '%2E.')
    """
    quoted = urllib.parse.quote(run_id, safe="")
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted[:200]


def _host() -> str:
    return _quoted(socket.gethostname())


def _changed_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
