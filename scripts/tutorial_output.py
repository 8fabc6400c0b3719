"""The output in docs/tutorial.md, by running its commands as a reader does.

python scripts/tutorial_output.py    # about two minutes; renews the output on the page

A block without a language has commands, a ``text`` block their output. Output of a finished command
is shown as a whole. A job's log is not: of each of its lines on the page, the first new line of the
log with the same event takes the place, with the same attributes. So the page decides what is
shown, and the job what it says; a line that does not come within the deadline is an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from elastic.cli.run import tree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
DEADLINE_S = 240.0
POLL_S = 0.05
# Installing is for a reader's first minutes; tests have an environment.
NOT_RUN = ("pip install ", "make demo", "source ")
RUNS_ON = ("elastic run", "elastic dashboard")  # in a terminal of their own

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Python writes a line and its end separately, so that torchrun's workers can be in between.
_LINE_END = re.compile(r"\n|(?<=\d)(?=\[\d\] Epoch)")
_LOG_LINE = re.compile(r"(\S+Z [A-Z]+ +\[[^\]]*\] )([a-z-]+)((?: \w+=.*)?)( …)?$")
_ATTRIBUTE = re.compile(r"(\w+)=('[^']*'|\"[^\"]*\"|\([^)]*\)|\S+)")
_PROCESS = re.compile(r"\$\(pgrep -nf (?:-- )?'?([^')]+)'?\)")
_MASKS = (
    (re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{8,12}\b"), "#"),  # ids of runs and checkpoints
    (re.compile(r"\d[\d.,:]*"), "#"),
    (re.compile(r"# (?:ms|s|min|h)(?: # (?:s|min))?(?![a-z])"), "# s"),
    (re.compile(r"# (?:B|KiB|MiB)\b"), "# B"),
    (re.compile(r"#[T-]#[-#T]*Z"), "#Z"),
    (re.compile(r"[─━]+"), "─"),  # a column is as wide as its longest value
    (re.compile(r" +"), " "),
    # A job's first seconds have neither.
    (re.compile(r", (?:goodput #%|last checkpoint of step #)[^,]*"), ""),
)


def masked(page: str) -> list[list[str]]:
    """The blocks of a page without what differs between two runs: times, sizes, counts, and the
    order of lines of several processes."""
    return [
        sorted(_masked(line) for line in _LINE_END.split(text) if line) for _, text in _blocks(page)
    ]


def renewed(page: str, folder: Path) -> str:
    """The page with the output of its commands, which run in ``folder``."""
    with _Terminal(folder) as terminal:
        return _BLOCK.sub(lambda block: _renewed(block, terminal), page)


def _renewed(block: re.Match[str], terminal: _Terminal) -> str:
    language, text = block.groups()
    if not language:
        terminal.enter(text.splitlines())
        return block[0]
    return f"```text\n{terminal.shown(text)}```" if language == "text" else block[0]


def _blocks(page: str) -> list[tuple[str, str]]:
    return [(block[1], block[2]) for block in _BLOCK.finditer(page)]


def _masked(line: str) -> str:
    for pattern, mask in _MASKS:
        line = pattern.sub(mask, line)
    return line.strip()


class _Terminal:
    """Runs commands one after the other; jobs and servers in the background."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = _environment(folder)
        self._output = ""  # of the last command that has ended, until it is shown
        self._running: list[subprocess.Popen[bytes]] = []
        self._log = _Log(folder / "log-0")  # of the newest command that runs on
        self._job = self._log

    def __enter__(self) -> _Terminal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._running:
            for pid in tree(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def enter(self, lines: list[str]) -> None:
        """Run the commands of one block."""
        for command in lines:
            if not command.startswith(NOT_RUN):
                self._run(command)

    def shown(self, text: str) -> str:
        """The output of the last command, or if it has none, the log's lines for those in
        ``text``."""
        if self._output:
            output, self._output = self._output, ""
            return output
        return "".join(f"{line}\n" for line in self._log.like(text.splitlines()))

    def _run(self, command: str) -> None:
        """Run a command to its end, or in the background if it is one that runs on."""
        self._log, self._output = self._job, ""
        self._log.skip()
        command = _PROCESS.sub(lambda call: str(self._newest(call[1])), command)
        if command.startswith(RUNS_ON):
            self._start(command)
            return
        done = subprocess.run(
            ["bash", "-c", f"{command}\npwd > {self._folder}/cwd"],
            cwd=self._cwd(),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # stderr has what depends on the machine, such as slow answers
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        self._output = done.stdout

    def _start(self, command: str) -> None:
        self._log = _Log(self._folder / f"log-{len(self._running)}")
        if "dashboard" in command:
            command += " --port=0"  # a reader's machine has port 8630 free
        else:
            self._job = self._log
        with self._log.path.open("wb") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self._cwd(),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._running.append(process)

    def _newest(self, pattern: str) -> int:
        """As ``pgrep -nf``, among the processes of this tutorial: others may run here, too."""
        pids = {pid for process in self._running for pid in tree(process.pid)}
        matching = [pid for pid in pids if re.search(pattern, _command_line(pid))]
        if not matching:
            raise AssertionError(f"no process is like {pattern!r}")
        return max(matching, key=_start_ticks)

    def _cwd(self) -> Path:
        entered = self._folder / "cwd"
        return Path(entered.read_text().strip()) if entered.exists() else self._folder


class _Log:
    """The output of a command that runs on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._used: set[int] = set()

    def skip(self) -> None:
        """Use no line that is there now."""
        self._used.update(range(len(self._lines())))

    def like(self, template: list[str]) -> Iterator[str]:
        """The next line for each of the template."""
        until_s = time.monotonic() + DEADLINE_S
        for line in template:
            while (new := self._like(line)) is None:
                if time.monotonic() >= until_s:
                    output = "\n".join(self._lines()[-40:])
                    raise AssertionError(f"no new line is like {line!r} in\n{output}")
                time.sleep(POLL_S)
            yield new

    def _like(self, line: str) -> str | None:
        if line == "…":
            return line
        for number, candidate in enumerate(self._lines()):
            if number not in self._used and _event(candidate) == _event(line):
                self._used.add(number)
                return _with_attributes(candidate, line)
        return None

    def _lines(self) -> list[str]:
        if not self.path.exists():
            return []
        complete = self.path.read_text(encoding="utf-8").rpartition("\n")[0]
        return complete.splitlines()


def _event(line: str) -> str:
    event = _LOG_LINE.match(line)
    return event[2] if event else _masked(line)


def _with_attributes(line: str, template: str) -> str:
    """The line with the attributes of the template only, and "…" for the others."""
    found, wanted = _LOG_LINE.match(line), _LOG_LINE.match(template)
    if found is None or wanted is None:
        return line
    names = {name for name, _ in _ATTRIBUTE.findall(wanted[3])}
    every = _ATTRIBUTE.findall(found[3])
    kept = [f" {name}={value}" for name, value in every if name in names]
    return "".join((found[1], found[2], *kept, " …" if len(kept) < len(every) else ""))


def _environment(folder: Path) -> Mapping[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ELASTIC_", "PET_"))}
    path = os.pathsep.join((str(Path(sys.executable).parent), kept.get("PATH", "")))
    own = {"XDG_STATE_HOME": str(folder / "state"), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    return {**kept, "PATH": path, **own}


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ")
    return ""


def _start_ticks(pid: int) -> tuple[int, int]:
    with contextlib.suppress(OSError, IndexError, ValueError):
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return int(stat.rpartition(")")[2].split()[19]), pid
    return -1, pid


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(renewed(page, Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
