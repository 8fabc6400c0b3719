"""Several nodes on one machine: each an agent process in a separate session.

The owner calls :meth:`LocalNodes.pump` in a loop; it passes on the nodes' output line by line
and detects ended processes. Not thread-safe.
"""

from __future__ import annotations

import math
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from elastic.cli.launch import bound_to_parent, processes
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.tuning.agent_intervals import CLI_BAR_S

LineSink = Callable[[str, str, str], None]  # node name, "stdout" or "stderr", line
_BOUND_TO_PARENT = Path(bound_to_parent.__file__)


@dataclass
class NodeProcess:
    """One node: its agent, and through it the workers."""

    name: str
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self.process.poll()


class OutputLines:
    """Splits a stream of bytes into lines. Of a progress bar, which is written over itself with
    carriage returns, a state is a line every few seconds, and the last one."""

    def __init__(self) -> None:
        self._rest = b""
        self._bar_from_s = -math.inf  # when the next state of a bar becomes a line

    def feed(self, data: bytes, now_s: float) -> list[str]:
        """The lines that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        # A carriage return at the end may be followed by a line feed.
        end = b"\r" if self._rest.endswith(b"\r") else b""
        *states, current = self._rest.removesuffix(end).split(b"\r")
        self._rest = current + end
        if (bar := _shown(states)) and now_s >= self._bar_from_s:
            self._bar_from_s = now_s + CLI_BAR_S
            lines.append(bar)
        return [_shown(line.split(b"\r")).decode(errors="replace") for line in lines]

    def end(self) -> list[str]:
        """The last line, if it is incomplete."""
        return self.feed(b"\n", math.inf) if self._rest else []


def _shown(states: Sequence[bytes]) -> bytes:
    """What a terminal shows of texts that were written over each other."""
    return next((state for state in reversed(states) if state), b"")


@dataclass(frozen=True, kw_only=True)
class _Stream:
    node: str
    name: str
    file: IO[bytes]
    lines: OutputLines


class LocalNodes:
    """Starts, follows and ends nodes. A context manager: its exit kills running nodes."""

    def __init__(self, on_line: LineSink, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._on_line = on_line
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._nodes: dict[str, NodeProcess] = {}

    def __enter__(self) -> LocalNodes:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> NodeProcess:
        """Start an agent. It gets SIGTERM when this process dies for any reason."""
        tied = [sys.executable, "-IS", str(_BOUND_TO_PARENT), str(os.getpid()), *command]
        process = subprocess.Popen(
            tied,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that Ctrl-C is forwarded by this process, once
        )
        node = self._nodes[name] = NodeProcess(name, process)
        for stream, file in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert file is not None
            os.set_blocking(file.fileno(), False)
            source = _Stream(node=name, name=stream, file=file, lines=OutputLines())
            self._selector.register(file, selectors.EVENT_READ, source)
        return node

    @property
    def nodes(self) -> tuple[NodeProcess, ...]:
        """All started nodes, in order of their start."""
        return tuple(self._nodes.values())

    @property
    def running(self) -> tuple[NodeProcess, ...]:
        return tuple(node for node in self._nodes.values() if node.exit_code is None)

    def pump(self, timeout_s: float) -> None:
        """Pass on output; returns after at most ``timeout_s``, sooner if there was output."""
        if not self._selector.get_map():
            self._clock.sleep(timeout_s)
            return
        for key, _ in self._selector.select(timeout_s):
            self._read(key.data)

    def signal(self, signum: int) -> None:
        """Send a signal to every running agent (not to workers: agents pass it on)."""
        processes.send([node.pid for node in self.running], signum)

    def kill(self, node: NodeProcess) -> None:
        """SIGKILL all processes of a node, as a failure of its machine would."""
        processes.kill_tree(node.pid)
        node.process.wait()

    def drain(self) -> None:
        """Pass on the remaining output of ended nodes."""
        while self._selector.get_map():
            ready = self._selector.select(0)
            if not ready:  # a process that outlived its agent holds the pipe open
                return
            for key, _ in ready:
                self._read(key.data)

    def close(self) -> None:
        """Kill running nodes and close the pipes. Idempotent."""
        for node in self.running:
            self.kill(node)
        self.drain()
        for key in list(self._selector.get_map().values()):
            self._end(key.data)
        self._selector.close()

    def _read(self, stream: _Stream) -> None:
        try:
            data = os.read(stream.file.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._end(stream)
            return
        self._emit(stream, stream.lines.feed(data, self._clock.monotonic()))

    def _end(self, stream: _Stream) -> None:
        self._selector.unregister(stream.file)
        stream.file.close()
        self._emit(stream, stream.lines.end())

    def _emit(self, stream: _Stream, lines: Sequence[str]) -> None:
        for line in lines:
            self._on_line(stream.node, stream.name, line)
