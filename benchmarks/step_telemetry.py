"""What telemetry costs a step: everything that is called in one, with `run.log` of two values.

    python benchmarks/step_telemetry.py             as a table
    python benchmarks/step_telemetry.py --json      one JSON object (measurement.py)

Also the section ``step`` of benchmarks/telemetry.py. The telemetry of a step: its phases on their
shared page, the account of times, `run.log`, the progress line, the check for a profile, a journal
on disk and the files of TensorBoard on their thread.

what a step gets longer, CPU
    Of the training thread, in real steps (three linear layers, backward, SGD), by turns at random
    with all of this, without any of it, and without any of it but with `loss.item()`, 10 ms apart:
    the differences of the medians, 100 steps of each a sample. To read the loss is part of logging
    it; a script that shows its loss by itself pays for that anyway. Budget: 50 us.
calls at the end of a step
    The calls alone, after such a step and as long a pause: no step's noise is in it. The median of
    100 steps is a sample.
calls after 20 ms of sleep
    The worst case: the calls alone, in steps that do nothing else. What they begin with finds the
    interpreter and torch in no cache; a training script's own lines pay for that. A sample is the
    mean of 50 steps: the wall time and the CPU time of the training thread, and the CPU time of all
    threads, the writers' included.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path

import torch
from measurement import Report, Row
from torch import nn

from elastic.groups.world import World
from elastic.hangs.page import Phase, phases
from elastic.telemetry.journal import Journal
from elastic.telemetry.log import get_logger
from elastic.train.current import StepAccount
from elastic.train.hooks import Hooks
from elastic.train.metrics import MetricsLog, TensorBoard
from elastic.train.observers import ProgressLine, StepProfiler

SEED = 7
STEP_S = 0.02
STEPS_OF_SAMPLE = 50
PAUSE_S = 0.01  # between two real steps
STEPS_OF_DIFFERENCE = 100  # with telemetry, and as many without
WIDTH, BATCH = 128, 16  # about a millisecond
# What a step with one optimizer and DDP goes through after it has begun, before it logs.
PHASES = (Phase.COMPUTE, Phase.COLLECTIVE, Phase.SCRIPT, Phase.OPTIMIZER, Phase.SCRIPT)


def step_rows(args: argparse.Namespace) -> list[Row]:
    """The cost of one step."""
    get_logger().setLevel(logging.WARNING)  # lines of progress are made, not shown
    with tempfile.TemporaryDirectory() as folder:
        return _rows(Path(folder), max(3, args.times) * 4)


class Telemetry:
    """What a worker keeps of its steps, of a real job's parts."""

    def __init__(self, folder: Path) -> None:
        self._step = 0
        self._journal = Journal(folder=folder / "journal", identity={"node": "a"}, role="worker")
        self._metrics = MetricsLog(self._journal, lambda: self._step + 1)
        self._metrics.add_writer(TensorBoard(folder / "tensorboard"))
        progress = ProgressLine(lambda: self._metrics.newest, lambda: 1000, is_on=True)
        account, profiler = StepAccount(self._journal), StepProfiler(self._journal)
        self._hooks = Hooks(account, self._metrics, progress, profiler)
        self._hooks.enter_world(_world(), 0)
        phases.start()

    def begin(self) -> None:
        """A step is handed out."""
        phases.begin_step(self._step, BATCH)

    def end(self, loss: torch.Tensor) -> None:
        """Log two values; the next step is asked for."""
        self._metrics.log({"loss": loss, "lr": 0.001})
        phases.enter(Phase.DATA)
        self._step += 1
        phases.committed(self._step)
        self._hooks.commit(self._step)

    def close(self) -> None:
        self._hooks.leave_world("close")
        self._hooks.close()
        self._journal.close()


def _rows(folder: Path, samples: int) -> list[Row]:
    telemetry = Telemetry(folder)
    loss = torch.tensor(0.5)

    def step() -> None:
        telemetry.begin()
        for phase in PHASES:
            phases.enter(phase)
        telemetry.end(loss)

    longer, beyond_reading, calls = _in_steps(telemetry, step, samples)
    wall, own, cpu = _measure(step, samples)
    telemetry.close()
    case, slept = "telemetry of a step", "calls after 20 ms of sleep"
    share = tuple(100 * us * 1e-6 / STEP_S for us in longer)
    return [
        Row(case, "what a step gets longer, CPU", "us", longer),
        Row(case, "the same, of 20 ms", "%", share),
        Row(case, "the same, beyond loss.item()", "us", beyond_reading),
        Row(case, "calls at the end of a step, CPU", "us", calls),
        Row(slept, "training thread", "us", wall),
        Row(slept, "training thread, CPU", "us", own),
        Row(slept, "all threads, CPU", "us", cpu),
    ]


class Turn(Enum):
    """What a step does besides training."""

    NOTHING = 0
    READING = 1  # its loss
    TELEMETRY = 2


def _in_steps(
    telemetry: Telemetry, calls: Callable[[], None], samples: int
) -> tuple[tuple[float, ...], ...]:
    train, turns = _training(telemetry), random.Random(SEED)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # all of a step's work is on the thread that is measured
    found = []
    for _ in range(samples + 1):  # the first one imports
        order = list(Turn) * STEPS_OF_DIFFERENCE
        turns.shuffle(order)
        took_us: dict[Turn, list[float]] = {turn: [] for turn in Turn}
        alone_us = []
        for turn in order:
            time.sleep(PAUSE_S)
            took_us[turn].append(_cpu_us(partial(train, turn)))
            if turn is Turn.NOTHING:
                alone_us.append(_cpu_us(calls))
        median_us = {turn: statistics.median(took) for turn, took in took_us.items()}
        full_us = median_us[Turn.TELEMETRY]
        found.append(
            (
                full_us - median_us[Turn.NOTHING],
                full_us - median_us[Turn.READING],
                statistics.median(alone_us),
            )
        )
    torch.set_num_threads(threads)
    return tuple(zip(*found[1:], strict=True))


def _cpu_us(call: Callable[[], None]) -> float:
    began_ns = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - began_ns) / 1000


def _training(telemetry: Telemetry) -> Callable[[Turn], None]:
    """A step of about a millisecond."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, labels = torch.randn(BATCH, WIDTH), torch.randint(0, 10, (BATCH,))

    def train(turn: Turn) -> None:
        with_telemetry = turn is Turn.TELEMETRY
        if with_telemetry:
            telemetry.begin()
        optimizer.zero_grad()
        if with_telemetry:
            phases.enter(Phase.COMPUTE)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        if with_telemetry:
            phases.enter(Phase.COLLECTIVE)
            phases.enter(Phase.SCRIPT)
            phases.enter(Phase.OPTIMIZER)
        optimizer.step()
        if with_telemetry:
            phases.enter(Phase.SCRIPT)
            telemetry.end(loss)
        elif turn is Turn.READING:
            loss.item()

    return train


def _measure(step: Callable[[], None], samples: int) -> tuple[tuple[float, ...], ...]:
    samples_us: list[list[float]] = [[], [], []]
    for _ in range(samples + 1):  # the first one imports
        in_step_s, began_s = [0.0, 0.0], _others_s()
        for _ in range(STEPS_OF_SAMPLE):
            began = time.perf_counter(), time.thread_time()
            step()
            took_s = time.perf_counter() - began[0], time.thread_time() - began[1]
            in_step_s = [a + b for a, b in zip(in_step_s, took_s, strict=True)]
            time.sleep(max(0.0, STEP_S - took_s[0]))
        in_step_s.append(in_step_s[1] + _others_s() - began_s)
        for seconds, found in zip(in_step_s, samples_us, strict=True):
            found.append(1e6 * seconds / STEPS_OF_SAMPLE)
    return tuple(tuple(found[1:]) for found in samples_us)


def _others_s() -> float:
    """CPU of the other threads: to sleep and to measure costs this one more than telemetry does."""
    return time.process_time() - time.thread_time()


def _world() -> World:
    return World(
        generation=1,
        nonce="",
        lineage=(),
        rank=0,
        size=1,
        local_rank=0,
        local_size=1,
        node="a",
        is_launched=False,
    )


def main() -> None:
    own = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    own.add_argument("--json", action="store_true", help="print the result as one object")
    own.add_argument("--times", type=int, default=5, help="samples, by four")
    args = own.parse_args()
    result = Report("step_telemetry", SEED, tuple(step_rows(args)))
    if args.json:
        print(result.to_json())
    else:
        result.print_table()


if __name__ == "__main__":
    main()
