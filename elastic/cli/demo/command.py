"""``elastic demo``: train on three local torchrun nodes, kill one, add one.

All files (etcd's data, checkpoints, ledger, journals, logs) are in a temporary folder. It is
removed at the end, unless ``--keep`` is given or a check failed. A report of the run, one
HTML page, is kept next to it.
"""

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
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console

from elastic.cli import exit_codes
from elastic.cli.command_parser import CommandParser
from elastic.cli.demo import plan as demo_plan
from elastic.cli.demo.journal import JournalEntry, JournalReader
from elastic.cli.demo.plan import Act, DemoPlan, JobPosition, position_of
from elastic.cli.demo.report import keep_report
from elastic.cli.demo.summary import Summary, summarize
from elastic.cli.demo.view import DemoView, open_view, print_summary, rows_of, sentence
from elastic.cli.launch.local_nodes import LocalNodes, NodeProcess
from elastic.cli.launch.run import StopRequest, stop_on_signals
from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import ConfigError
from elastic.store.embedded.etcd import EmbeddedEtcd
from elastic.testing.ledger import LedgerReader
from elastic.tuning.agent_intervals import CLI_POLL_S, DEMO_TIMEOUT_S
from elastic.tuning.agent_options import MODES

# A copy of examples/digits.py, so that an installed wheel has the script, too. In a separate
# folder: a script's folder comes first on sys.path.
SCRIPT = Path(__file__).parents[1] / "scripts" / "digits.py"
TRAIN_SAMPLES = 1437  # of 1,797: examples/digits.py keeps 360 for the test
EPOCHS = 20
STEPS_BETWEEN_CHECKPOINTS = 10
TAIL_LINES = 15
_RESULT = re.compile(r'\{"accuracy": ([0-9.]+)')
_DESCRIPTION = (
    "Train a small CNN on three local torchrun nodes, kill one, add one, and check that no sample "
    "was lost or repeated. etcd's data, checkpoints and logs are in a temporary folder, which is "
    "removed at the end unless --keep is given or a check failed. An HTML report is kept."
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
            summary = Demo(folder, view, mode=args.mode, timeout_s=args.timeout_s).run(stop)
        keep = args.keep or not (summary.ok or stop.signum)
        if stop.signum is not None:
            return exit_codes.INTERRUPTED
        report = keep_report(folder / "journal", folder.with_name(f"{folder.name}-report"))
        _print_result(summary, report, json_wanted=json_wanted)
        if not summary.ok:
            _show_logs(folder)
        return exit_codes.DONE if summary.ok else exit_codes.FAILED
    finally:
        if keep:
            print(f"elastic: all files are kept in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def parser() -> argparse.ArgumentParser:
    """The command line of ``elastic demo``."""
    parser = CommandParser(prog="elastic demo", description=_DESCRIPTION)
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json"),
        default="table",
        help="json: print the result as one object, and progress on stderr",
    )
    parser.add_argument(
        "--mode", choices=MODES, default=MODES[0], help="recovery mode (default: %(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the temporary folder")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=DEMO_TIMEOUT_S,
        help="give up after this long (default: %(default)g)",
    )
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
        mode: str,
        timeout_s: float,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._folder = folder
        self._view = view
        self._mode = mode
        self._timeout_s = timeout_s
        self._clock = clock
        self._plan = DemoPlan()
        self._ledger = LedgerReader(folder / "ledger")
        self._journal = JournalReader(folder / "journal")
        self._entries: list[JournalEntry] = []
        self._shown: set[str] = set()
        self._logs: dict[str, TextIO] = {}
        self._accuracy: float | None = None
        self._waiting_since_s: float | None = None  # since when it waits for a node
        self._delay_ms = -1

    def run(self, stop: StopRequest) -> Summary:
        """Run to the end, to the timeout or to the user's signal."""
        began = self._clock.monotonic()
        with contextlib.ExitStack() as stack:
            etcd = stack.enter_context(EmbeddedEtcd(data_dir=self._folder / "etcd"))
            stack.callback(self._close_logs)
            nodes = stack.enter_context(LocalNodes(self._take_line))
            self._step_rate(None)
            for name in demo_plan.NODES:
                self._start(nodes, name, etcd.endpoint)
            late = False
            while nodes.running and stop.signum is None and not late:
                self._follow(nodes, CLI_POLL_S)
                self._look(nodes, etcd.endpoint)
                late = self._clock.monotonic() - began > self._timeout_s
            if late:
                self._say(f"giving up after {self._timeout_s:.0f} s")
            nodes.drain()
            self._look(nodes, etcd.endpoint)
            codes = {node.name: node.exit_code for node in nodes.nodes}
        return summarize(
            self._ledger.read(),
            self._entries,
            self._plan,
            mode=self._mode,
            accuracy=self._accuracy,
            train_samples=TRAIN_SAMPLES,
            epochs=EPOCHS,
            exit_codes=codes,
            duration_s=self._clock.monotonic() - began,
        )

    def _start(self, nodes: LocalNodes, name: str, endpoint: str) -> NodeProcess:
        path = self._folder / "logs" / f"{name}.log"
        path.parent.mkdir(exist_ok=True)
        self._logs[name] = path.open("w", buffering=1)
        self._say(f"{name} starts")
        return nodes.start(
            name,
            node_command(endpoint, self._folder, self._mode),
            node_environment(name, self._folder),
        )

    def _follow(self, nodes: LocalNodes, duration_s: float) -> None:
        until = self._clock.monotonic() + duration_s
        while (left := until - self._clock.monotonic()) > 0 and nodes.running:
            nodes.pump(left)

    def _look(self, nodes: LocalNodes, endpoint: str) -> None:
        for entry in self._journal.read_new():
            self._entries.append(entry)
            text = sentence(entry)
            if text is not None and text not in self._shown:
                self._shown.add(text)
                self._view.say(text, entry.time_s)
        ledger = self._ledger.read()
        position = position_of(ledger)
        act = self._plan.next_act(position) if nodes.running else None
        if act is not None and position is not None:
            self._do(act, position, nodes, endpoint)
        self._step_rate(position)
        killed = {demo_plan.VICTIM} if self._plan.killed_at else set()
        codes = {node.name: node.exit_code for node in nodes.nodes}
        self._view.update(rows_of(ledger, codes, killed, newest=self._newest_generation))

    @property
    def _newest_generation(self) -> int:
        formed = (e.fields["generation"] for e in self._entries if e.name == "world-formed")
        return max(formed, default=0)

    def _do(self, act: Act, position: JobPosition, nodes: LocalNodes, endpoint: str) -> None:
        if act is Act.KILL:
            nodes.kill(next(node for node in nodes.nodes if node.name == demo_plan.VICTIM))
            position = position_of(self._ledger.read()) or position  # where it really hit
            where = f"at step {position.step}, in the middle of epoch {position.epoch}"
            self._say(f"{demo_plan.VICTIM} is killed (SIGKILL, agent and worker), {where}")
        else:
            self._start(nodes, demo_plan.ADDED, endpoint)
        self._plan = self._plan.after(act, position)

    def _step_rate(self, position: JobPosition | None) -> None:
        """Slow the job down while waiting for a node, so that it does not end first."""
        if position is not None and not self._plan.waits_for_node(position):
            self._waiting_since_s = None
        elif self._waiting_since_s is None:
            self._waiting_since_s = self._clock.monotonic()
        waited_s = self._clock.monotonic() - (self._waiting_since_s or 0.0)
        delay_ms = round(1000 * self._plan.step_delay_s(position, waited_s))
        if delay_ms != self._delay_ms:
            self._delay_ms = delay_ms
            path = step_delay_file(self._folder)
            new = path.with_suffix(".new")
            new.write_text(str(delay_ms))
            new.replace(path)  # a worker reads the old or the new one

    def _say(self, text: str) -> None:
        self._view.say(text, self._clock.wall())

    def _take_line(self, node: str, stream: str, line: str) -> None:
        self._logs[node].write(line + "\n")
        match = _RESULT.search(line)
        if match is not None:
            self._accuracy = float(match[1])

    def _close_logs(self) -> None:
        for log in self._logs.values():
            log.close()


def node_command(endpoint: str, folder: Path, mode: str) -> list[str]:
    """Plain torchrun, as a user would start it on each node."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        f"--nnodes={demo_plan.MIN_NODES}:{demo_plan.MAX_NODES}",
        "--nproc-per-node=1",
        "--rdzv-backend=etcd-v3",
        f"--rdzv-endpoint={endpoint}",
        "--rdzv-id=demo",
        f"--rdzv-conf=mode={mode}",
        "--local-addr=127.0.0.1",
        "--max-restarts=100",
        *(str(SCRIPT), f"--epochs={EPOCHS}", f"--step-delay-file={step_delay_file(folder)}"),
        f"--checkpoints={folder / 'checkpoints'}",
        f"--every-steps={STEPS_BETWEEN_CHECKPOINTS}",
    ]


def step_delay_file(folder: Path) -> Path:
    """The file from which the script reads its delay per step, in milliseconds."""
    return folder / "step-delay-ms"


def node_environment(name: str, folder: Path) -> dict[str, str]:
    """The user's environment without the variables that would change the demo."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("ELASTIC_", "PET_"))}
    return {
        **own,
        "ELASTIC_NODE_NAME": name,
        "ELASTIC_LEDGER": str(folder / "ledger"),
        "ELASTIC_JOURNAL": str(folder / "journal"),
        # The report draws the loss from the journals: a TensorBoard folder is not needed.
        "ELASTIC_TENSORBOARD": "off",
        "OMP_NUM_THREADS": "1",  # three workers on what may be two cores
    }


def _print_result(summary: Summary, report: Path | None, *, json_wanted: bool) -> None:
    if json_wanted:
        print(json.dumps({**summary.as_json(), "report": str(report) if report else None}))
        return
    print_summary(summary, Console())
    if report is not None:
        print(f"{'report':<14}{report}")


def _show_logs(folder: Path) -> None:
    for path in sorted((folder / "logs").glob("*.log")):
        with path.open(errors="replace") as file:
            tail = deque(file, maxlen=TAIL_LINES)
        print(f"--- {path}", *(line.rstrip("\n") for line in tail), sep="\n", file=sys.stderr)
