"""Shows the demo while it runs: a live table on a terminal, timestamped lines elsewhere."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elastic.cli.demo.journal import JournalEntry
from elastic.cli.demo.summary import Summary
from elastic.clock import SYSTEM_CLOCK
from elastic.testing.ledger import RunLedger

EVENTS_SHOWN = 12
_STYLES = {"training": "green", "killed": "bold red", "done": "bold green", "forming": "yellow"}


@dataclass(frozen=True)
class NodeRow:
    """One node, as the table shows it."""

    name: str
    state: str
    rank: int | None = None
    generation: int | None = None
    step: int | None = None
    epoch: int | None = None


class DemoView(Protocol):
    """The interface of the demo's displays."""

    def say(self, text: str, time_s: float) -> None:
        """Show an event."""
        ...

    def update(self, rows: Sequence[NodeRow]) -> None:
        """Show the current state of the nodes."""
        ...

    def close(self) -> None: ...


class LineView:
    """One line per event, and one at the beginning of each epoch."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._epoch = -1

    def say(self, text: str, time_s: float) -> None:
        print(_stamp(time_s), text, file=self._file, flush=True)

    def update(self, rows: Sequence[NodeRow]) -> None:
        busy = [row for row in rows if row.state == "training" and row.epoch is not None]
        if not busy:
            return
        front = max(busy, key=lambda row: row.step or 0)
        assert front.epoch is not None
        if front.epoch > self._epoch:
            self._epoch = front.epoch
            text = f"epoch {front.epoch}: step {front.step}, {len(busy)} nodes training"
            self.say(text, SYSTEM_CLOCK.wall())

    def close(self) -> None:
        self._file.flush()


class TableView:
    """A table of the nodes and the latest events, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._events: deque[tuple[str, str]] = deque(maxlen=EVENTS_SHOWN)
        self._rows: Sequence[NodeRow] = ()
        self._live = Live(self._render(), console=console, auto_refresh=False)
        self._live.start()

    def say(self, text: str, time_s: float) -> None:
        self._events.append((_stamp(time_s), text))
        self._live.update(self._render(), refresh=True)

    def update(self, rows: Sequence[NodeRow]) -> None:
        self._rows = rows
        self._live.update(self._render(), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Group:
        table = Table(title="elastic demo", title_justify="left")
        for column in ("node", "state", "rank", "generation", "step", "epoch"):
            table.add_column(column, justify="left" if column in ("node", "state") else "right")
        for row in self._rows:
            numbers = (row.rank, row.generation, row.step, row.epoch)
            state = Text(row.state, style=_STYLES.get(row.state, ""))
            table.add_row(row.name, state, *("" if n is None else str(n) for n in numbers))
        events = (
            Text.assemble((stamp, "dim"), " ", text, overflow="ellipsis", no_wrap=True)
            for stamp, text in self._events
        )
        return Group(table, *events)


def open_view(*, json_wanted: bool) -> DemoView:
    """A table on a terminal, lines elsewhere; with -o json, stdout is reserved for the data."""
    if json_wanted:
        return LineView(sys.stderr)
    console = Console()
    return TableView(console) if console.is_terminal else LineView(sys.stdout)


def sentence(entry: JournalEntry) -> str | None:
    """A journal entry as a sentence, or None if it is not worth showing."""
    f = entry.fields
    if entry.name == "world-formed":
        return f"generation {f['generation']}, {f['size']} workers: {f['reason']}"
    if entry.name == "node-lost":
        return f"{entry.node} noticed the loss of {f['lost']}: {f['reason']}"
    if entry.name == "state-restored":
        return f"{entry.node} restored step {f['step']} from {f['source']}"
    if entry.name == "store-problem":
        return f"{entry.node}: etcd: {f['error']}; {f['consequence']}"
    if entry.name == "job-ended":
        return f"{entry.node}: {f['outcome']}: {f['reason']}"
    return None


def rows_of(
    ledger: RunLedger, exit_codes: dict[str, int | None], killed: set[str], *, newest: int
) -> list[NodeRow]:
    """One row per started node; ``newest`` is the last agreed generation."""
    rows = []
    for node, code in exit_codes.items():
        start = max(
            (s for s in ledger.starts if s.node == node), key=lambda s: s.generation, default=None
        )
        step = max(
            (s for s in ledger.steps if s.node == node), key=lambda s: s.time_s, default=None
        )
        in_newest = start is not None and start.generation == newest
        rows.append(
            NodeRow(
                name=node,
                state=_state(code, node in killed, in_newest),
                rank=start.rank if start else None,
                generation=start.generation if start else None,
                step=step.step if step else None,
                epoch=step.epoch if step else None,
            )
        )
    return rows


def _state(code: int | None, killed: bool, in_newest: bool) -> str:
    if killed:
        return "killed"
    if code is not None:
        return "done" if code == 0 else f"exit {code}"
    return "training" if in_newest else "forming"


def print_summary(summary: Summary, console: Console) -> None:
    """The result as text."""
    console.print(_generations_table(summary))
    once = sum(s.once for s in summary.samples)
    twice = sum(s.twice for s in summary.samples)
    never = sum(s.never for s in summary.samples)
    accuracy = "unknown" if summary.accuracy is None else f"{summary.accuracy:.2%}"
    lines = {
        "killed": summary.killed or "no node",
        "added": summary.added or "no node",
        "samples": f"{once} seen once, {twice} twice, {never} never, in {len(summary.samples)} "
        "epochs of the surviving lineage",
        "steps": f"{summary.steps}, and {summary.recomputed_steps} recomputed",
        "test accuracy": accuracy,
        "duration": f"{summary.duration_s:.0f} s",
    }
    for name, text in lines.items():
        console.print(Text(f"{name:<14}{text}"), soft_wrap=True)
    for failure in summary.failures:
        console.print(Text(f"FAILED: {failure}", style="bold red"), soft_wrap=True)
    if summary.ok:
        console.print(Text("every check passed", style="bold green"))


def _generations_table(summary: Summary) -> Table:
    table = Table(title="generations", title_justify="left")
    for column in ("generation", "cause", "nodes"):
        table.add_column(column)
    for column in ("steps", "recomputed", "pause"):
        table.add_column(column, justify="right")
    for g in summary.generations:
        steps = "none" if g.last_step is None else f"{g.first_step}-{g.last_step}"
        pause = "" if g.pause_s is None else f"{g.pause_s:.2f} s"
        names = ", ".join(g.nodes)
        table.add_row(str(g.generation), g.cause, names, steps, str(g.recomputed_steps), pause)
    return table


def _stamp(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, timezone.utc).strftime("%H:%M:%S.%f")[:-3]
