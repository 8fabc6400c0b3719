"""The agent's hang watch on real processes: pages, kernel states, debuggers, and its actions."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.journal import MemoryJournal
from kit.manual_clock import ManualClock

from elastic.hangs import kernel
from elastic.hangs.page import BudgetPolicy, Phase, RankFacts, budget_s
from elastic.hangs.report import HangResponse, Judged, ReportFolder
from elastic.hangs.stacks import StackSource
from elastic.hangs.verdict import Confidence, HangAction, HangKind, Judgment
from elastic.hangs.watch import HangWatch, Supervised, WatchedWorker
from elastic.telemetry.events import HangFound, HangOver
from elastic.testing.waiting import eventually

TICK_S = 0.02
POLICY = BudgetPolicy(hang_timeout_s=0.5)
LONG_S = 100.0
MAX_PER_TICK_S = 1e-3  # 0.5 % of a core at five ticks a second
PTRACE_SEIZE, PTRACE_DETACH = 0x4206, 17

WORKER = """
import sys, time
from elastic.hangs import stacks
from elastic.hangs.page import Phase
from elastic.hangs.page import phases
fd, source = phases.start(), stacks.offer()
phases.enter_generation(3)
phases.begin_world(0)
for step in range(10):
    phases.begin_step(step)
    phases.committed(step + 1)
print(fd, source.fd, source.signum, flush=True)
for line in sys.stdin:
    phase = Phase[line.strip()]
    if phase is Phase.COMPUTE:
        phases.begin_step(10)
    phases.enter(phase)
    print("done", flush=True)
"""


class Worker:
    """A process with a progress page."""

    def __init__(self, program: str = WORKER) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        fd, stacks_fd, signum = map(int, self._line().split())
        self.fd, self.source = fd, StackSource(stacks_fd, signum)

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def enter(self, phase: Phase) -> None:
        self.tell(phase.name)

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        assert self._line() == "done\n"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Agent:
    """A watch with its response, as in an agent; ticked by its thread or by the test."""

    def __init__(self, folder: Path, *, acts: bool = True, clock: Any = None) -> None:
        self.facts: queue.Queue[tuple[RankFacts, ...]] = queue.Queue()
        self.generations: list[int] = []  # about which facts were published
        self.killed: list[tuple[int, str]] = []
        self.aborted: list[tuple[int, str]] = []
        self.errors: list[BaseException] = []
        self.journal = MemoryJournal()
        more = {} if clock is None else {"clock": clock}
        self.response = HangResponse(
            node="node0",
            acts=acts,
            stop_grace_s=0.3,
            folder=ReportFolder(str(folder)),
            journal=self.journal,
            before_kill=lambda pid, reason: self.killed.append((pid, reason)),
            abort=lambda generation, reason: self.aborted.append((generation, reason)),
        )
        self.watch = HangWatch(
            policy=POLICY,
            node="node0",
            tick_s=TICK_S,
            on_facts=self._publish,
            on_stopped=self._stopped,
            on_error=self.errors.append,
            **more,
        )
        self.watch.enter_world(3, 0)

    def _publish(self, generation: int, ranks: tuple[RankFacts, ...]) -> None:
        self.generations.append(generation)
        self.facts.put(ranks)

    def _stopped(self, worker: WatchedWorker, facts: RankFacts, stopped_s: float) -> None:
        self.response.on_stopped(self.watch, worker, facts, stopped_s)

    def add(self, worker: Worker) -> None:
        self.watch.add(worker.pid, 0, worker.fd, worker.source)

    def judged(self, facts: RankFacts, action: HangAction = HangAction.KILL) -> None:
        verdict = Judgment(
            action=action,
            kind=HangKind.ABSENT,
            culprits=(facts.rank,),
            culprit=facts,
            confidence=Confidence.HIGH,
            reason="rank 0 on node0 hangs",
        )
        judged = Judged(verdict=verdict, generation=3, size=2, ranks=(facts,))
        self.watch.post(lambda: self.response.carry_out(self.watch, judged))

    def events(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.journal.events if isinstance(event, kind)]


@pytest.fixture
def worker(request: pytest.FixtureRequest) -> Iterator[Worker]:
    with contextlib.closing(Worker(getattr(request, "param", WORKER))) as worker:
        yield worker


@pytest.fixture
def make_agent(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    agents: list[Agent] = []

    def make(**settings: Any) -> Agent:
        agent = Agent(tmp_path, **settings)
        agent.watch.start()
        agents.append(agent)
        return agent

    yield make
    for agent in agents:
        agent.watch.close()
        assert agent.errors == []


def quiet(agent: Agent) -> RankFacts:
    """The facts, once they show that the worker has exceeded its budget."""
    while True:
        ranks = agent.facts.get(timeout=60)
        if ranks and ranks[0].quiet_s >= POLICY.hang_timeout_s:
            return ranks[0]


def test_a_hang_suspicion_is_published_and_withdrawn_on_progress(
    worker: Worker, make_agent: Callable[..., Agent]
) -> None:
    worker.enter(Phase.COMPUTE)
    agent = make_agent()
    agent.add(worker)
    facts = quiet(agent)
    assert (facts.rank, facts.generation, facts.step, facts.phase) == (0, 3, 10, Phase.COMPUTE)
    assert facts.kernel.wait_channel
    worker.enter(Phase.SCRIPT)
    assert agent.facts.get(timeout=60) == ()
    assert worker.process.poll() is None


def test_the_culprit_is_killed_and_reported(
    worker: Worker, make_agent: Callable[..., Agent], tmp_path: Path
) -> None:
    worker.enter(Phase.COMPUTE)
    agent, error_file = make_agent(), tmp_path / "error.json"
    agent.add(worker)
    agent.watch.supervise((Supervised(worker.pid, 0, str(error_file)),))
    agent.judged(quiet(agent))
    assert worker.process.wait(60) == -signal.SIGKILL
    event = eventually(lambda: agent.events(HangFound), "the event")[0]
    ((pid, reason),) = agent.killed
    assert pid == worker.pid
    assert reason.startswith("rank 0 on node0 hangs; ")
    assert reason.endswith(f"report: {event.report}")
    assert event.where.startswith("<module> (<string>:")
    text = Path(event.report).read_text()
    assert "the forward and backward pass" in text
    assert "<string>" in text, "its stack"
    found = json.loads(next(tmp_path.glob("*generation3.json")).read_text())
    assert found["ranks"][0]["pid"] == worker.pid
    told = json.loads(error_file.read_text())
    assert told["message"]["message"] == agent.killed[0][1], "torchrun's own account of it"


def test_a_worker_that_makes_progress_before_the_kill_is_spared(
    worker: Worker, make_agent: Callable[..., Agent]
) -> None:
    worker.enter(Phase.COMPUTE)
    agent = make_agent()
    agent.add(worker)
    facts = quiet(agent)
    worker.enter(Phase.SCRIPT)
    agent.judged(facts)
    eventually(lambda: agent.events(HangOver), "the event")
    assert agent.killed == [] and worker.process.poll() is None


def test_report_only_mode_kills_no_worker(worker: Worker, make_agent: Callable[..., Agent]) -> None:
    worker.enter(Phase.COMPUTE)
    agent = make_agent(acts=False)
    agent.add(worker)
    agent.judged(quiet(agent))
    event = eventually(lambda: agent.events(HangFound), "the event")[0]
    assert event.action == "report"
    assert "none (hang_detection=report)" in Path(event.report).read_text()
    assert agent.killed == [] and worker.process.poll() is None


def test_a_stopped_worker_is_killed_with_and_without_a_page(
    worker: Worker, make_agent: Callable[..., Agent]
) -> None:
    agent, plain = make_agent(), subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)
    agent.add(worker)
    agent.watch.supervise((Supervised(worker.pid, 0, ""), Supervised(plain.pid, 1, "")))
    for pid in (worker.pid, plain.pid):
        os.kill(pid, signal.SIGSTOP)
    assert worker.process.wait(60) == plain.wait(60) == -signal.SIGKILL
    events = eventually(lambda: e if len(e := agent.events(HangFound)) == 2 else None, "both")
    assert {e.kind for e in events} == {"stopped"}
    assert {e.ranks for e in events} == {(0,), (1,)}
    assert plain.stdin is not None
    plain.stdin.close()


def test_short_stops_are_tolerated(worker: Worker, make_agent: Callable[..., Agent]) -> None:
    agent = make_agent()
    agent.add(worker)
    for _ in range(5):
        os.kill(worker.pid, signal.SIGSTOP)
        time.sleep(0.05)
        os.kill(worker.pid, signal.SIGCONT)
        worker.enter(Phase.SCRIPT)
    assert agent.killed == [] and worker.process.poll() is None


def test_a_traced_worker_is_never_killed(worker: Worker, make_agent: Callable[..., Agent]) -> None:
    """The kernel reports tracing by gdb, strace and py-spy, whatever the process reports."""
    worker.enter(Phase.COMPUTE)
    agent, libc = make_agent(), ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    assert libc.ptrace(PTRACE_SEIZE, worker.pid, None, None) == 0, os.strerror(ctypes.get_errno())
    agent.add(worker)
    facts = quiet(agent)
    assert facts.kernel.tracer_pid == os.getpid()
    assert facts.is_traced
    os.kill(worker.pid, signal.SIGSTOP)
    event = eventually(lambda: agent.events(HangFound), "the event")[0]
    assert (event.kind, event.action) == ("debugged", "leave-alone")
    assert f"process {os.getpid()} traces it" in event.reason
    assert agent.killed == []
    # Not poll(): waitpid reports the stop to its tracer.
    times = kernel.process_times(worker.pid)
    assert times is not None
    assert times.state == "t"


@pytest.mark.parametrize("gap_s", [1.0, 10.0, 3600.0])
def test_a_paused_machine_has_no_hung_workers(worker: Worker, tmp_path: Path, gap_s: float) -> None:
    """A paused VM, a suspended laptop, a frozen container: no process could run."""
    clock = ManualClock()
    agent = Agent(tmp_path, clock=clock)
    agent.add(worker)
    agent.watch.run_tasks()
    worker.enter(Phase.COMPUTE)
    for _ in range(10):
        clock.advance(TICK_S)
        agent.watch.tick()
    clock.advance(gap_s)
    agent.watch.tick()
    (watched,) = agent.watch.workers
    assert watched.quiet_s <= 13 * TICK_S
    agent.watch.close()


@pytest.mark.parametrize(
    ("phase", "restarts"),
    [(Phase.COLLECTIVE, True), (Phase.FORMING, True), (Phase.DATA, False), (Phase.COMPUTE, False)],
)
def test_a_newer_world_restarts_the_time_of_ranks_that_wait_for_others(
    worker: Worker, tmp_path: Path, phase: Phase, restarts: bool
) -> None:
    """A hung data loader enters no world: with a new world for each other failure it was never
    found."""
    clock = ManualClock()
    agent = Agent(tmp_path, clock=clock)
    agent.add(worker)
    worker.enter(phase)
    agent.watch.run_tasks()
    while (watched := agent.watch.worker(worker.pid)) is None or watched.quiet_s < LONG_S * TICK_S:
        clock.advance(TICK_S)
        agent.watch.tick()
    agent.watch.enter_world(4, 1)
    clock.advance(TICK_S)
    agent.watch.run_tasks()
    assert watched.quiet_s == (0.0 if restarts else pytest.approx(LONG_S * TICK_S))
    assert agent.watch.facts(watched).rank == 1
    agent.watch.close()


LOADER = """
import sys, time
from multiprocessing import get_context
from elastic.hangs.page import Phase, phases
def work(begun, computes):
    while computes:
        begun.set()
    begun.set()
    time.sleep(1e6)
print(phases.start(), 0, 0, flush=True)
phases.enter_generation(3)
phases.begin_world(0)
context = get_context("fork")
for line in sys.stdin:
    begun = context.Event()
    worker = context.Process(target=work, args=(begun, line == "computes\\n"), daemon=True)
    worker.start()
    begun.wait()
    phases.enter(Phase.DATA)
    print("done", flush=True)
    sys.stdin.readline()
    worker.kill()
    worker.join()
    print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("worker", [LOADER], indirect=True)
def test_a_first_batch_may_take_long_while_a_data_worker_computes(
    worker: Worker, tmp_path: Path
) -> None:
    """A data worker that sleeps returns no batch: the time of the first steps is not for it."""
    clock = ManualClock()
    agent = Agent(tmp_path, clock=clock)
    agent.add(worker)
    agent.watch.run_tasks()
    limit_s = 10 * POLICY.hang_timeout_s
    for kind in ("computes", "sleeps"):
        worker.tell(kind)
        clock.advance(TICK_S)
        agent.watch.tick()
        watched = agent.watch.worker(worker.pid)
        assert watched is not None and watched.quiet_s == 0.0
        while watched.quiet_s < 2 * limit_s:
            clock.advance(TICK_S)
            agent.watch.tick()
            if kind == "computes":
                wait_for_cpu(worker.pid, TICK_S)
        budget = budget_s(agent.watch.facts(watched), POLICY)
        assert budget == (limit_s if kind == "sleeps" else POLICY.first_steps_s)
        worker.tell("end the data worker")
    agent.watch.close()


def wait_for_cpu(pid: int, used_s: float) -> None:
    """Until the process and its children have used that much."""
    until_s = kernel.data_cpu_s(pid) + used_s
    eventually(lambda: kernel.data_cpu_s(pid) >= until_s, "CPU time")


def test_the_facts_of_a_hung_rank_are_published_again_for_a_newer_world(
    worker: Worker, tmp_path: Path
) -> None:
    """The leader ignores those about an earlier one."""
    clock = ManualClock()
    agent = Agent(tmp_path, clock=clock)
    agent.add(worker)
    worker.enter(Phase.COMPUTE)
    agent.watch.run_tasks()
    while not agent.generations:
        clock.advance(TICK_S)
        agent.watch.tick()
    for generation in (4, 5):
        agent.watch.enter_world(generation, 1)
        clock.advance(TICK_S)
        agent.watch.run_tasks()
        agent.watch.tick()
        assert agent.generations[-1] == generation
    agent.watch.close()


def test_a_tick_is_cheap(worker: Worker, tmp_path: Path) -> None:
    """A tick over eight healthy workers."""
    agent = Agent(tmp_path)
    others = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) for _ in range(7)]
    agent.add(worker)
    agent.watch.supervise(
        tuple(
            Supervised(pid, n, "") for n, pid in enumerate([worker.pid, *(o.pid for o in others)])
        )
    )
    agent.watch.run_tasks()

    def timed() -> float:
        began_s = time.thread_time()
        agent.watch.tick()
        return time.thread_time() - began_s

    best_s = min(timed() for _ in range(50))
    for other in others:
        other.kill()
        other.wait()
        assert other.stdin is not None
        other.stdin.close()
    agent.watch.close()
    assert len(agent.watch.workers) == 8
    assert best_s < MAX_PER_TICK_S


def test_a_hang_of_all_ranks_aborts_and_reforms_the_world(
    worker: Worker, make_agent: Callable[..., Agent]
) -> None:
    worker.enter(Phase.COMPUTE)
    agent = make_agent()
    agent.add(worker)
    agent.judged(replace(quiet(agent)), HangAction.ABORT_AND_REFORM)
    event = eventually(lambda: agent.events(HangFound), "the event")[0]
    assert agent.aborted == [(3, f"rank 0 on node0 hangs; report: {event.report}")]
    assert worker.process.poll() is None


def test_an_unwritable_report_folder(
    worker: Worker, make_agent: Callable[..., Agent], tmp_path: Path
) -> None:
    """The worker is still killed."""
    (tmp_path / "file").write_text("")
    worker.enter(Phase.COMPUTE)
    agent = make_agent()
    agent.response._folder = ReportFolder(str(tmp_path / "file" / "below"))
    agent.add(worker)
    agent.judged(quiet(agent))
    assert worker.process.wait(60) == -signal.SIGKILL
    event = eventually(lambda: agent.events(HangFound), "the event")[0]
    assert event.report == ""


def test_closing_the_watch_joins_its_thread(make_agent: Callable[..., Agent]) -> None:
    agent = make_agent()
    assert any(t.name == "elastic-hangs" for t in threading.enumerate())
    agent.watch.close()
    assert not any(t.name == "elastic-hangs" for t in threading.enumerate())
