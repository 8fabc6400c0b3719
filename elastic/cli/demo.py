"""``elastic demo``: three nodes train, one is killed, another joins."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elastic.cli import arguments
from elastic.cli.arguments import CommandParser, add_output
from elastic.cli.report import rendered, write_report
from elastic.cli.run import (
    IMPORTS,
    LocalNodes,
    NodeProcess,
    SlowStart,
    StopRequest,
    stop_on_signals,
)
from elastic.errors import SYSTEM_CLOCK, Clock, ConfigError, ElasticError
from elastic.report.model import RunReport, report_of
from elastic.store.embedded import EmbeddedEtcd
from elastic.telemetry.files import replacing
from elastic.telemetry.journal import ENVELOPE
from elastic.telemetry.reader import JournalFolder, JournalRecord, merge, read_folder
from elastic.telemetry.runs import default_journal
from elastic.testing.ledger import LedgerError, LedgerReader, RunLedger
from elastic.tuning.intervals import (
    CLI_POLL_S,
)

# Duration of a step of the demo, slow enough to watch.
DEMO_STEP_S = 0.06
# The demo gives up after this: twenty times its duration on an idle laptop.
DEMO_TIMEOUT_S = 600.0
# For a node of the demo to start and join.
DEMO_PATIENCE_S = 180.0

# ----------------------------------------------------------------------------
# The demo's schedule: kill a node in the middle of an epoch, later add one. Pure.
#
# The job must not end before a slowly starting node joins (a cold installation, a busy machine),
# so steps slow down while the plan waits for a node, and last at least as long as the timeout.

NODES = ("node-0", "node-1", "node-2")
VICTIM = "node-1"
ADDED = "node-3"
MIN_NODES, MAX_NODES = 2, 3

STEPS_BEFORE_KILL = 20  # in the first world: past warm-up, so that the pause measures the kill
STEPS_BEFORE_JOIN = 10  # in the world without the victim

STEPS = 300  # 20 epochs of 1,437 samples in batches of 96
STEPS_AFTER_JOIN = 60  # reserved for the world with the joining node
STEPS_AFTER_START = 180  # reserved after the first world: kill, recovery, joining node


class Act(Enum):
    """The next action on the job."""

    KILL = "kill"
    JOIN = "join"


@dataclass(frozen=True)
class JobPosition:
    """The job's position: its newest generation that completed a step."""

    generation: int
    nodes: frozenset[str]
    step: int  # the last one completed
    epoch: int
    steps_done: int  # in this generation
    in_mid_epoch: bool


@dataclass(frozen=True)
class DemoPlan:
    """The completed acts, and the job's position at each."""

    killed_at: JobPosition | None = None
    joined_at: JobPosition | None = None

    def next_act(self, position: JobPosition | None) -> Act | None:
        """The next act, once it is due."""
        if position is None:
            return None
        if self.killed_at is None:
            ready = len(position.nodes) == MAX_NODES and position.in_mid_epoch
            return Act.KILL if ready and position.steps_done >= STEPS_BEFORE_KILL else None
        if self.joined_at is None:
            recovered = position.generation > self.killed_at.generation
            return Act.JOIN if recovered and position.steps_done >= STEPS_BEFORE_JOIN else None
        return None

    def waits_for_node(self, position: JobPosition | None) -> bool:
        """Whether the plan waits for a started node to take part."""
        if position is None or self.killed_at is None:
            return position is None or len(position.nodes) < MAX_NODES
        return self.joined_at is not None and ADDED not in position.nodes

    def step_delay_s(self, position: JobPosition | None, waited_s: float) -> float:
        """The delay per step, ``waited_s`` seconds after the wait for a node began.

        While waiting, the steps that are not reserved last as long as the timeout.
        """
        left_s = DEMO_PATIENCE_S - waited_s
        if position is None or left_s <= 0 or not self.waits_for_node(position):
            return DEMO_STEP_S
        kept = STEPS_AFTER_START if self.killed_at is None else STEPS_AFTER_JOIN
        spare = max(1, STEPS - 1 - position.step - kept)
        return max(DEMO_STEP_S, left_s / spare)

    def after(self, act: Act, position: JobPosition) -> DemoPlan:
        """The plan after ``act`` was done at ``position``."""
        if act is Act.KILL:
            return replace(self, killed_at=position)
        return replace(self, joined_at=position)


def position_of(ledger: RunLedger) -> JobPosition | None:
    """The job's position, or None before its first step."""
    if not ledger.steps:
        return None
    generation = max(s.generation for s in ledger.steps)
    steps = [s for s in ledger.steps if s.generation == generation]
    last = max(steps, key=lambda s: s.step)
    return JobPosition(
        generation=generation,
        nodes=frozenset(s.node for s in ledger.starts if s.generation == generation),
        step=last.step,
        epoch=last.epoch,
        steps_done=len({s.step for s in steps}),
        in_mid_epoch=_in_mid_epoch(ledger, last.step, last.epoch),
    )


def _in_mid_epoch(ledger: RunLedger, step: int, epoch: int) -> bool:
    """Whether ``step`` is in the middle half of its epoch; all epochs are as long as epoch 0."""
    if epoch == 0:
        return False
    length = len({s.step for s in ledger.steps if s.epoch == 0})
    begin = min(s.step for s in ledger.steps if s.epoch == epoch)
    return length // 4 <= step - begin < length - length // 4


# ----------------------------------------------------------------------------
# Follows the journals of the demo's nodes.


@dataclass(frozen=True)
class JournalEntry:
    """One event of one process."""

    name: str  # in kebab case: "world-formed"
    node: str
    time_s: float  # wall clock
    fields: dict[str, Any] = field(default_factory=dict)


class JournalReader:
    """Reads each line once; an incomplete line is left for the next call."""

    def __init__(self, folder: Path) -> None:
        self._journals = JournalFolder(folder)

    def read_new(self) -> list[JournalEntry]:
        """Entries written since the last call, in order of time."""
        entries = [_entry(record) for record in self._journals.read_new()]
        return sorted(entries, key=lambda entry: entry.time_s)


def _entry(record: JournalRecord) -> JournalEntry:
    fields = {name: value for name, value in record.data.items() if name not in ENVELOPE}
    return JournalEntry(record.name, record.node, record.time_s, fields)


# ----------------------------------------------------------------------------
# The demo's report: `elastic report` of its journals.


def pauses_of(report: RunReport) -> dict[int, float]:
    """The pause before each generation; of several worlds of an incident, before the last."""
    return {i.generations[-1]: i.pause_s for i in report.incidents}


def keep_report(report: RunReport, stem: Path) -> Path | None:
    """Write ``stem``.html. Returns None if there is nothing to report or the file cannot be
    written; the latter prints a message and does not fail the demo."""
    if not report.goodput.nodes:
        return None
    path = stem.with_name(f"{stem.name}.html")
    try:
        write_report(path, rendered(report, "html"))
    except ElasticError as error:
        print(f"elastic: the demo has no report: {error}", file=sys.stderr)
        return None
    return path


# ----------------------------------------------------------------------------
# The demo's result: what happened, the pauses, and whether every check passed.

ACCURACY_NEEDED = 0.97


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One world of the job."""

    generation: int
    cause: str
    reason: str
    nodes: tuple[str, ...]
    first_step: int
    last_step: int | None  # None: it ended before its first step
    pause_s: float | None  # of the incident before it, as in the report
    recomputed_steps: int  # done here and discarded by a later generation


@dataclass(frozen=True, kw_only=True)
class EpochSamples:
    """How often the samples of an epoch were seen on the surviving lineage."""

    epoch: int
    once: int
    twice: int  # or more
    never: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All results of the demo. ``failures`` is empty if every check passed."""

    generations: tuple[Generation, ...]
    samples: tuple[EpochSamples, ...]
    steps: int  # on the surviving lineage
    recomputed_steps: int
    accuracy: float | None
    killed: str | None  # the job's position at the kill, as text
    added: str | None  # the job's position at the start of the joining node's agent
    duration_s: float
    failures: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        """The object that ``-o json`` prints."""
        return {"ok": self.ok, **asdict(self)}


def summarize(
    ledger: RunLedger,
    journal: Iterable[JournalEntry],
    pauses: Mapping[int, float],
    plan: DemoPlan,
    *,
    accuracy: float | None,
    train_samples: int,
    epochs: int,
    exit_codes: dict[str, int | None],
    duration_s: float,
) -> Summary:
    """Summarize and check the run. Pure. ``pauses``: seconds before each generation."""
    generations = generations_of(ledger, journal, pauses)
    samples = samples_of(ledger, train_samples, epochs)
    failures = [
        *_failed_nodes(exit_codes),
        *_failed_plan(generations, plan),
        *_failed_samples(ledger, train_samples, epochs),
        *_failed_weights(ledger),
        *_failed_accuracy(accuracy),
    ]
    return Summary(
        generations=generations,
        samples=samples,
        steps=len({s.step for s in ledger.surviving}),
        recomputed_steps=ledger.recomputed_steps,
        accuracy=accuracy,
        killed=_where(VICTIM, plan.killed_at),
        added=_where(ADDED, plan.joined_at),
        duration_s=duration_s,
        failures=tuple(failures),
    )


def generations_of(
    ledger: RunLedger, journal: Iterable[JournalEntry], pauses: Mapping[int, float]
) -> tuple[Generation, ...]:
    """Every generation that began on a worker, with the cause recorded in the journals."""
    formed = {e.fields["generation"]: e.fields for e in journal if e.name == "world-formed"}
    result = []
    for number in sorted({s.generation for s in ledger.starts}):
        starts = sorted((s for s in ledger.starts if s.generation == number), key=lambda s: s.rank)
        done = {s.step for s in ledger.steps if s.generation == number}
        cut = ledger.cuts.get(number)
        fields = formed.get(number, {})
        result.append(
            Generation(
                generation=number,
                cause=str(fields.get("cause", "unknown")),
                reason=str(fields.get("reason", "")),
                nodes=tuple(dict.fromkeys(s.node for s in starts)),
                first_step=min(s.step for s in starts),
                last_step=max(done, default=None),
                pause_s=pauses.get(number),
                recomputed_steps=sum(1 for step in done if cut is not None and step >= cut),
            )
        )
    return tuple(result)


def samples_of(ledger: RunLedger, train_samples: int, epochs: int) -> tuple[EpochSamples, ...]:
    """The sample counts of every epoch."""
    result = []
    for epoch in range(epochs):
        seen = ledger.coverage(train_samples, epoch)
        result.append(
            EpochSamples(
                epoch=epoch,
                once=seen.once,
                twice=len(seen.twice_or_more),
                never=len(seen.never),
            )
        )
    return tuple(result)


def _where(node: str, at: JobPosition | None) -> str | None:
    if at is None:
        return None
    return f"{node} at step {at.step} in epoch {at.epoch}, generation {at.generation}"


def _failed_nodes(exit_codes: dict[str, int | None]) -> Iterable[str]:
    for node, code in exit_codes.items():
        if node != VICTIM and code != 0:
            yield f"{node} ended with {code}, not 0"


def _failed_plan(generations: Sequence[Generation], plan: DemoPlan) -> Iterable[str]:
    if plan.killed_at is None:
        yield f"the job ended before {VICTIM} was killed"
        return
    if plan.joined_at is None:
        yield f"the job ended before {ADDED} could be started"
        return
    worked = [g for g in generations if g.last_step is not None]
    smaller = [g for g in worked if g.generation > plan.killed_at.generation]
    if not any(VICTIM not in g.nodes and ADDED not in g.nodes for g in smaller):
        yield f"no generation trained without {VICTIM} and before {ADDED}"
    if not any(ADDED in g.nodes and len(g.nodes) == MAX_NODES for g in smaller):
        waited = f"{DEMO_PATIENCE_S:.0f} s"
        yield f"no generation trained with {ADDED}: it did not join within {waited}"


def _failed_samples(ledger: RunLedger, train_samples: int, epochs: int) -> Iterable[str]:
    try:
        ledger.assert_exactly_once(train_samples, epochs)
        ledger.assert_one_world_at_a_time()
    except LedgerError as error:
        yield str(error)


def _failed_weights(ledger: RunLedger) -> Iterable[str]:
    try:
        ledger.final_hash()
    except LedgerError as error:
        yield str(error)


def _failed_accuracy(accuracy: float | None) -> Iterable[str]:
    if accuracy is None:
        yield "no node reported the test accuracy"
    elif accuracy < ACCURACY_NEEDED:
        yield f"test accuracy {accuracy:.2%} is below {ACCURACY_NEEDED:.0%}"


# ----------------------------------------------------------------------------
# Shows the demo while it runs: a live table on a terminal, timestamped lines elsewhere.

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
            nodes = "1 node" if len(busy) == 1 else f"{len(busy)} nodes"
            text = f"epoch {front.epoch}: step {front.step}, {nodes} training"
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


# ----------------------------------------------------------------------------
# ``elastic demo``: train on three local torchrun nodes, kill one, add one.
#
# etcd's data, checkpoints, ledger and logs are in a temporary folder. It is removed at the end,
# unless ``--keep`` is given or a check failed. The journals are in the user's state folder, so that
# `elastic status`, `events` and `report` work afterwards. A report of the run, one HTML page, is
# kept next to the temporary folder.

# A copy of examples/digits.py, so that an installed wheel has the script, too. In a separate
# folder: a script's folder comes first on sys.path.
SCRIPT = Path(__file__).parent / "scripts" / "digits.py"
TRAIN_SAMPLES = 1437  # of 1,797: examples/digits.py keeps 360 for the test
EPOCHS = 20
STEPS_BETWEEN_CHECKPOINTS = 10
TAIL_LINES = 15
_RESULT = re.compile(r'\{"accuracy": ([0-9.]+)')
_DESCRIPTION = (
    "Train a small CNN on three local torchrun nodes, kill one, add one, and check that no sample "
    "was lost or repeated. etcd's data, checkpoints and logs are in a temporary folder, which is "
    "removed at the end unless --keep is given or a check failed. An HTML report and the journals "
    "are kept."
)


def main(argv: Sequence[str]) -> int:
    """Run the demo; returns 0 if every check passed."""
    args = parser().parse_args(list(argv))
    json_wanted = args.output == "json"
    _require_dependencies()
    folder = Path(tempfile.mkdtemp(prefix="elastic-demo-"))
    keep = True
    try:
        view = open_view(json_wanted=json_wanted)
        with stop_on_signals() as stop, contextlib.closing(view):
            demo = Demo(folder, view)
            summary = demo.run(stop)
        keep = args.keep or not (summary.ok or stop.signum)
        if stop.signum is not None:
            return arguments.INTERRUPTED
        report = keep_report(demo.report, folder.with_name(f"{folder.name}-report"))
        _print_result(summary, report, json_wanted=json_wanted)
        if not summary.ok:
            _show_logs(folder)
        return arguments.DONE if summary.ok else arguments.FAILED
    finally:
        if keep:
            print(f"elastic: all files are kept in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def parser() -> argparse.ArgumentParser:
    """The command line of ``elastic demo``."""
    parser = CommandParser(prog="elastic demo", description=_DESCRIPTION)
    add_output(
        parser, "table", "json", text="json: print the result as one object, and progress on stderr"
    )
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder")
    return parser


def _require_dependencies() -> None:
    if importlib.util.find_spec("sklearn") is None:
        raise ConfigError(
            "the demo trains on scikit-learn's digits, and scikit-learn is not installed",
            hint="pip install 'torch-elastic-harness[demo]'",
        )


class Demo:
    """One run of the demo in one folder."""

    def __init__(
        self,
        folder: Path,
        view: DemoView,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._folder = folder
        self._view = view
        self._clock = clock
        self._plan = DemoPlan()
        self._ledger = LedgerReader(folder / "ledger")
        self._run_id = folder.name.removeprefix("elastic-")
        self._journals = _journal_folder(self._run_id, folder)
        self._journal = JournalReader(self._journals)
        self._entries: list[JournalEntry] = []
        self._shown: set[str] = set()
        self._logs: dict[str, TextIO] = {}
        self._accuracy: float | None = None
        self._waiting_since_s: float | None = None  # since when it waits for a node
        self._delay_ms = -1
        self._slow_start = SlowStart(clock)

    def run(self, stop: StopRequest) -> Summary:
        """Run to the end, to the timeout or to the user's signal."""
        began = self._clock.monotonic()
        with contextlib.ExitStack() as stack:
            etcd = stack.enter_context(EmbeddedEtcd(data_dir=self._folder / "etcd"))
            stack.callback(self._close_logs)
            nodes = stack.enter_context(LocalNodes(self._take_line))
            self._step_rate(None)
            for name in NODES:
                self._start(nodes, name, etcd.endpoint)
            self._say(IMPORTS)
            late = False
            while nodes.running and stop.signum is None and not late:
                self._follow(nodes, CLI_POLL_S)
                self._look(nodes, etcd.endpoint)
                late = self._clock.monotonic() - began > DEMO_TIMEOUT_S
            if stop.signum is not None:
                self._say("interrupted: the nodes are killed")
            if late:
                self._say(f"giving up after {DEMO_TIMEOUT_S:.0f} s")
            nodes.drain()
            self._look(nodes, etcd.endpoint)
            codes = {node.name: node.exit_code for node in nodes.nodes}
        return summarize(
            self._ledger.read(),
            self._entries,
            pauses_of(self.report),
            self._plan,
            accuracy=self._accuracy,
            train_samples=TRAIN_SAMPLES,
            epochs=EPOCHS,
            exit_codes=codes,
            duration_s=self._clock.monotonic() - began,
        )

    @cached_property
    def report(self) -> RunReport:
        """The report of the run, once that is over."""
        return report_of(merge(*read_folder(self._journals)))

    def _start(self, nodes: LocalNodes, name: str, endpoint: str) -> NodeProcess:
        path = self._folder / "logs" / f"{name}.log"
        path.parent.mkdir(exist_ok=True)
        self._logs[name] = path.open("w", buffering=1)
        self._say(f"{name} starts")
        return nodes.start(
            name,
            node_command(endpoint, self._run_id, self._folder),
            node_environment(name, self._journals, self._folder),
        )

    def _follow(self, nodes: LocalNodes, duration_s: float) -> None:
        until = self._clock.monotonic() + duration_s
        while (left := until - self._clock.monotonic()) > 0 and nodes.running:
            nodes.pump(left)

    def _look(self, nodes: LocalNodes, endpoint: str) -> None:
        for entry in self._journal.read_new():
            self._entries.append(entry)
            if entry.name == "world-entered":
                self._slow_start.begin_workers()
            text = sentence(entry)
            if text is not None and text not in self._shown:
                self._shown.add(text)
                self._view.say(text, entry.time_s)
        ledger = self._ledger.read()
        position = position_of(ledger)
        if position is not None:
            self._slow_start.end()
        if late := self._slow_start.late():
            self._say(late)
        act = self._plan.next_act(position) if nodes.running else None
        if act is not None and position is not None:
            self._do(act, position, nodes, endpoint)
        self._step_rate(position)
        killed = {VICTIM} if self._plan.killed_at else set()
        codes = {node.name: node.exit_code for node in nodes.nodes}
        self._view.update(rows_of(ledger, codes, killed, newest=self._newest_generation))

    @property
    def _newest_generation(self) -> int:
        formed = (e.fields["generation"] for e in self._entries if e.name == "world-formed")
        return max(formed, default=0)

    @property
    def _is_joined(self) -> bool:
        """Whether a world with the added node was formed."""
        formed = (e.fields.get("nodes", ()) for e in self._entries if e.name == "world-formed")
        return any(ADDED in nodes for nodes in formed)

    def _do(self, act: Act, position: JobPosition, nodes: LocalNodes, endpoint: str) -> None:
        if act is Act.KILL:
            at_s = self._clock.wall()  # before a survivor can notice it
            nodes.kill(next(node for node in nodes.nodes if node.name == VICTIM))
            position = position_of(self._ledger.read()) or position  # where it really hit
            where = f"at step {position.step}, in the middle of epoch {position.epoch}"
            self._say(f"{VICTIM} is killed (SIGKILL, agent and worker), {where}", at_s)
        else:
            self._start(nodes, ADDED, endpoint)
            self._say(f"steps are slower until {ADDED} has joined: training must not end before")
        self._plan = self._plan.after(act, position)

    def _step_rate(self, position: JobPosition | None) -> None:
        """Slow the job down while waiting for a node, so that it does not end first."""
        if self._is_joined or (position is not None and not self._plan.waits_for_node(position)):
            self._waiting_since_s = None
        elif self._waiting_since_s is None:
            self._waiting_since_s = self._clock.monotonic()
        waited_s = self._clock.monotonic() - (self._waiting_since_s or 0.0)
        # At full speed into the joining node's world, so that its pause measures the join.
        delay_s = DEMO_STEP_S if self._is_joined else self._plan.step_delay_s(position, waited_s)
        delay_ms = round(1000 * delay_s)
        if delay_ms != self._delay_ms:
            self._delay_ms = delay_ms
            with replacing(step_delay_file(self._folder)) as new:
                new.write_text(str(delay_ms))

    def _say(self, text: str, time_s: float | None = None) -> None:
        self._view.say(text, self._clock.wall() if time_s is None else time_s)

    def _take_line(self, node: str, stream: str, line: str) -> None:
        self._logs[node].write(line + "\n")
        match = _RESULT.search(line)
        if match is not None:
            self._accuracy = float(match[1])

    def _close_logs(self) -> None:
        for log in self._logs.values():
            log.close()


def _journal_folder(run_id: str, folder: Path) -> Path:
    """In the run's folder of the state folder, where they stay: its checkpoints are removed. Or, if
    that cannot be written, in the demo's own."""
    journals = default_journal(run_id).with_name("demo")
    try:
        journals.mkdir(parents=True, exist_ok=True)
    except OSError:
        return folder / "journal"
    return journals


def node_command(endpoint: str, run_id: str, folder: Path) -> list[str]:
    """Plain torchrun, as a user would start it on each node."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={MIN_NODES}:{MAX_NODES}",
        "--nproc-per-node=1",
        "--rdzv-backend=etcd-v3",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={run_id}",
        "--local-addr=127.0.0.1",
        "--max-restarts=100",
        *(str(SCRIPT), f"--epochs={EPOCHS}", f"--step-delay-file={step_delay_file(folder)}"),
        f"--checkpoints={folder / 'checkpoints'}",
        f"--every-steps={STEPS_BETWEEN_CHECKPOINTS}",
    ]


def step_delay_file(folder: Path) -> Path:
    """The file from which the script reads its delay per step, in milliseconds."""
    return folder / "step-delay-ms"


def node_environment(name: str, journals: Path, folder: Path) -> dict[str, str]:
    """The user's environment without the variables that would change the demo."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("ELASTIC_", "PET_"))}
    return {
        **own,
        "ELASTIC_NODE_NAME": name,
        "ELASTIC_LEDGER": str(folder / "ledger"),
        "ELASTIC_JOURNAL": str(journals),
        # The report draws the loss from the journals: a TensorBoard folder is not needed.
        "ELASTIC_TENSORBOARD": "off",
        "OMP_NUM_THREADS": "1",  # three workers on what may be two cores
    }


_NEXT = """
next
  elastic tutorial FOLDER      port an ordinary DDP script, and kill its workers
  elastic run --nodes-local 3 --embedded-etcd --nnodes 2:3 SCRIPT
  elastic events, report       of this run; elastic status, dashboard: of a running one"""


def _print_result(summary: Summary, report: Path | None, *, json_wanted: bool) -> None:
    if json_wanted:
        print(json.dumps({**summary.as_json(), "report": str(report) if report else None}))
        return
    print_summary(summary, Console())
    if report is not None:
        print(f"{'report':<14}{report}")
    print(_NEXT)


def _show_logs(folder: Path) -> None:
    for path in sorted((folder / "logs").glob("*.log")):
        with path.open(errors="replace") as file:
            tail = deque(file, maxlen=TAIL_LINES)
        print(f"--- {path}", *(line.rstrip("\n") for line in tail), sep="\n", file=sys.stderr)
