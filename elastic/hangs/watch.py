"""The agent's thread that checks its workers' pages and /proc a few times a second.

It only observes. Time in which the machine, the agent or the worker itself could not run does not
count: a paused VM, a suspended laptop and a machine at 100 % load have no hung workers. So quiet
time is counted in ticks of this thread, each at most twice its length, and without the time that
the worker has spent waiting for a core or for pages from disk.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from elastic.errors import SYSTEM_CLOCK, Clock
from elastic.hangs import kernel
from elastic.hangs.page import (
    FIRST_STEPS,
    IDLE_SHARE,
    BudgetPolicy,
    Flag,
    KernelFacts,
    PageReader,
    Phase,
    RankFacts,
    Reading,
    is_on_host,
    operation_name,
    thresholds_s,
)
from elastic.hangs.stacks import StackSource
from elastic.hangs.verdict import FlightEntry
from elastic.tuning.intervals import HANG_KILL_S

_SMOOTHING = 0.3  # of the CPU share, over about a second
_MAX_TICKS = 2  # the most that one tick may count for
# The fraction of a tick. A worker that waited for a core for less time was not starved.
_STARVED = 0.75
# A loader that gets no batch wakes up every few seconds, and so does each of its data workers: they
# count as idle below this fraction of a core, and this much of its time in all.
_IDLE_DATA_SHARE, _IDLE_DATA_S = 0.005, 0.03
_UNKNOWN_S = (0.0,) * len(Phase)
_NO_STACKS = StackSource(-1, 0)


@dataclass(frozen=True)
class Supervised:
    """A worker's process that torchrun supervises."""

    pid: int
    local_rank: int
    error_file: str


@dataclass(eq=False)
class WatchedWorker:
    """The data about one process."""

    pid: int
    local_rank: int
    pidfd: int
    page: PageReader | None = None  # a script that does not call elastic.join() has none
    stacks: StackSource = _NO_STACKS
    error_file: str = ""  # the file from which torchrun reads its error
    reading: Reading | None = None
    quiet_s: float = 0.0
    idle_s: float = 0.0
    data_cpu_s: float = 0.0  # when idle_s began
    stopped_s: float = 0.0
    level: int = 0  # thresholds that its quiet time has passed
    cpu_share: float = 0.0
    state: str = "S"
    cpu_s: float = 0.0
    major_faults: int = 0
    starved_s: float = 0.0
    tracer_pid: int = 0
    doomed_s: float = 0.0  # for which the kernel has not carried out a SIGKILL
    flight: tuple[FlightEntry, ...] = ()  # of the newest generation
    flight_generation: int = 0
    # The generation of the flight that a report lacks, and its call.
    awaited: tuple[int, Callable[[tuple[FlightEntry, ...]], object]] | None = None

    def flight_of(self, generation: int) -> tuple[FlightEntry, ...]:
        """The collectives that it recently began in that generation, as reported."""
        return self.flight if self.flight_generation == generation else ()

    def kill(self) -> None:
        """SIGKILL this process, and no other one that has reused its pid."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def is_as_judged(self, facts: RankFacts) -> bool:
        """Whether it has shown no sign of life since these facts."""
        if self.page is None:
            return True
        reading = self.page.read()
        return reading is not None and (reading.generation, reading.count) == (
            facts.generation,
            facts.progress,
        )

    def close(self) -> None:
        """Close its descriptors."""
        os.close(self.pidfd)
        if self.page is not None:
            self.page.close()


class HangWatch:
    """Its owner calls ``close``. Callbacks run on the thread ``elastic-hangs``.

    ``on_facts`` receives the newest generation and the facts of all ranks of this node that make no
    progress, whenever a verdict on them may change, and no facts once all make progress.
    ``on_stopped`` receives each stopped worker, also one stopped by a debugger, with every tick.
    ``on_unkillable`` receives a worker that got SIGKILL, whoever sent it, and still exists after
    ``HANG_KILL_S``, once.
    """

    def __init__(
        self,
        *,
        policy: BudgetPolicy,
        node: str,
        tick_s: float,
        on_facts: Callable[[int, tuple[RankFacts, ...]], object],
        on_stopped: Callable[[WatchedWorker, RankFacts, float], object],
        on_error: Callable[[BaseException], object],
        on_unkillable: Callable[[WatchedWorker, RankFacts], object] = lambda worker, facts: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._policy = policy
        self._node = node
        self._tick_s = tick_s
        self._on_facts = on_facts
        self._on_stopped = on_stopped
        self._on_error = on_error
        self._on_unkillable = on_unkillable
        self._clock = clock
        self._workers: dict[int, WatchedWorker] = {}  # of this thread
        self._tasks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._published: tuple[object, ...] = ()
        self._generation = 0  # of the newest world
        self._first_rank: int | None = None
        self._supervised: tuple[Supervised, ...] = ()
        self.checkpoint_step: int | None = None  # the last one that a worker reported
        self.planned_steps: int | None = None  # of the whole job, as reported by a worker
        self._last_tick_s = clock.monotonic()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-hangs", daemon=True)

    def start(self) -> None:
        """Start watching."""
        self._thread.start()

    def close(self) -> None:
        """Stop and join. Idempotent."""
        self._closing.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def post(self, task: Callable[[], object]) -> None:
        """Run ``task`` on the thread before the next tick. From any thread."""
        self._tasks.put(task)

    # -- watched workers: from any thread -------------------------------------------------------

    def add(self, pid: int, local_rank: int, page_fd: int, stacks: StackSource) -> None:
        """A worker maintains a page."""
        self.post(lambda: self._add(pid, local_rank, page_fd, stacks))

    def supervise(self, workers: tuple[Supervised, ...]) -> None:
        """All workers of this node, also those without a page."""
        if workers != self._supervised:  # torchrun polls ten times a second
            self._supervised = workers
            self.post(lambda: self._supervise(workers))

    def learn_flight(self, pid: int, generation: int, flight: tuple[FlightEntry, ...]) -> None:
        """A worker has reported the collectives that it began."""
        self.post(lambda: self._learn_flight(pid, generation, flight))

    def remove(self, pid: int) -> None:
        """A worker has ended."""
        self.post(lambda: self._remove(pid))

    def enter_world(self, generation: int, first_rank: int | None) -> None:
        """There is a newer world. ``first_rank``: of local rank 0; None: this node is not in it."""
        self.post(lambda: self._enter_world(generation, first_rank))

    def worker(self, pid: int) -> WatchedWorker | None:
        """On the thread only."""
        return self._workers.get(pid)

    @property
    def workers(self) -> tuple[WatchedWorker, ...]:
        """On the thread only."""
        return tuple(self._workers.values())

    def flights_of(
        self, generation: int, late: Callable[[int, tuple[FlightEntry, ...]], object]
    ) -> dict[int, tuple[FlightEntry, ...]]:
        """The recent collectives of each rank. ``late`` is called with a rank whose collectives
        arrive afterwards: a busy worker may answer after the verdict. On the thread only."""
        flights = {}
        for worker in self.workers:
            rank = self.facts(worker).rank
            if flight := worker.flight_of(generation):
                flights[rank] = flight
            else:
                worker.awaited = generation, functools.partial(late, rank)
        return flights

    def _enter_world(self, generation: int, first_rank: int | None) -> None:
        """The time of ranks that waited for others restarts: they wait for this world now.

        That of a rank in its own code does not: a hung one never enters a world, and as long as
        other failures form new ones it would never have used up its budget.
        """
        self._generation, self._first_rank = generation, first_rank
        for worker in self._workers.values():
            if worker.reading is None or _may_wait_for_others(worker.reading):
                worker.quiet_s, worker.level = 0.0, 0

    def _add(self, pid: int, local_rank: int, page_fd: int, stacks: StackSource) -> None:
        worker = self._open(pid, local_rank)
        if worker is None or worker.page is not None:
            return
        try:
            worker.page = PageReader(pid, page_fd)
        except OSError:
            return  # it has ended, or /proc is not accessible: the kernel's state may still be
        worker.stacks = stacks

    def _supervise(self, workers: tuple[Supervised, ...]) -> None:
        for supervised in workers:
            worker = self._open(supervised.pid, supervised.local_rank)
            if worker is not None:
                worker.error_file = supervised.error_file
        pids = {supervised.pid for supervised in workers}
        for pid in [pid for pid, worker in self._workers.items() if worker.page is None]:
            if pid not in pids:
                self._remove(pid)

    def _open(self, pid: int, local_rank: int) -> WatchedWorker | None:
        if pid not in self._workers:
            try:
                pidfd = os.pidfd_open(pid)
            except OSError:
                return None  # it has ended
            self._workers[pid] = WatchedWorker(pid, local_rank, pidfd)
        return self._workers[pid]

    def _learn_flight(self, pid: int, generation: int, flight: tuple[FlightEntry, ...]) -> None:
        if (worker := self._workers.get(pid)) is not None:
            worker.flight, worker.flight_generation = flight, generation
            if worker.awaited is not None and worker.awaited[0] == generation:
                _, add = worker.awaited
                worker.awaited = None
                add(flight)

    def _remove(self, pid: int) -> None:
        worker = self._workers.pop(pid, None)
        if worker is not None:
            worker.close()

    # -- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self.run_tasks()
                self.tick()
        except BaseException as error:
            self._on_error(error)
            raise
        finally:
            for pid in list(self._workers):
                self._remove(pid)

    def run_tasks(self) -> None:
        """Run the requests of other threads until the next tick is due."""
        until_s = self._last_tick_s + self._tick_s
        while not self._closing.is_set():
            try:
                self._tasks.get(timeout=max(0.0, until_s - self._clock.monotonic()))()
            except queue.Empty:
                return

    def tick(self) -> None:
        """Check all workers once."""
        now_s = self._clock.monotonic()
        passed_s = min(now_s - self._last_tick_s, _MAX_TICKS * self._tick_s)
        self._last_tick_s = now_s
        for worker in list(self._workers.values()):
            self._check(worker, passed_s)
        stuck = [worker for worker in self._workers.values() if worker.level]
        # (Facts are about a generation: those about an earlier one are superseded.)
        state = tuple(
            (self._generation, w.pid, w.level, w.reading and w.reading.flags, w.tracer_pid)
            for w in stuck
        )
        if state != self._published:
            self._published = state
            self._on_facts(self._generation, tuple(self.facts(worker) for worker in stuck))

    def _check(self, worker: WatchedWorker, passed_s: float) -> None:
        times = kernel.process_times(worker.pid)
        if times is not None:
            self._check_doomed(worker, times, passed_s)
        if times is None or times.state in "ZX":
            worker.level = 0
            return
        share = (times.cpu_s - worker.cpu_s) / self._tick_s
        worker.cpu_share += _SMOOTHING * (min(share, 64.0) - worker.cpu_share)
        has_faulted = times.major_faults != worker.major_faults
        worker.state, worker.cpu_s = times.state, times.cpu_s
        worker.major_faults = times.major_faults
        if times.state in "Tt":
            worker.stopped_s += passed_s
            worker.tracer_pid = kernel.tracer_pid(worker.pid)
            self._on_stopped(worker, self.facts(worker), worker.stopped_s)
        else:
            worker.stopped_s = 0.0
        if worker.page is None or (reading := worker.page.read()) is None:
            return
        if worker.reading is None or reading.count != worker.reading.count:
            worker.quiet_s, worker.tracer_pid = 0.0, 0
            worker.starved_s = kernel.starved_s(worker.pid)
            worker.idle_s, worker.data_cpu_s = 0.0, -1.0
        elif not has_faulted:
            starved_s = self._starved_s(worker)
            counted_s = passed_s
            if starved_s > _STARVED * passed_s:
                counted_s -= min(starved_s, passed_s)
            worker.quiet_s += counted_s
            if reading.phase is Phase.DATA and reading.steps_in_world < FIRST_STEPS:
                self._count_idle(worker, counted_s)
        worker.reading = reading
        if reading.checkpoint_step >= 0:
            self.checkpoint_step = reading.checkpoint_step
        self.planned_steps = reading.planned_steps or None
        facts = self._facts(worker, reading, KernelFacts())
        limits_s = thresholds_s(facts, self._policy)
        worker.level = sum(worker.quiet_s >= limit_s for limit_s in limits_s)
        if worker.level:
            worker.tracer_pid = kernel.tracer_pid(worker.pid)

    def _check_doomed(
        self, worker: WatchedWorker, times: kernel.ProcessTimes, passed_s: float
    ) -> None:
        before_s = worker.doomed_s
        worker.doomed_s += passed_s
        if not kernel.is_doomed(worker.pid, times):
            worker.doomed_s = 0.0
        elif before_s < HANG_KILL_S <= worker.doomed_s:
            worker.state = times.state
            self._on_unkillable(worker, self.facts(worker))

    def _count_idle(self, worker: WatchedWorker, counted_s: float) -> None:
        worker.idle_s += counted_s
        data_cpu_s = kernel.data_cpu_s(worker.pid)
        used_s = abs(data_cpu_s - worker.data_cpu_s)  # less if a data worker has ended
        is_idle = used_s <= max(_IDLE_DATA_S, _IDLE_DATA_SHARE * worker.idle_s)
        # Other threads of the process may read ahead, too.
        if not is_idle or worker.cpu_share > IDLE_SHARE:
            worker.idle_s, worker.data_cpu_s = 0.0, data_cpu_s

    def _starved_s(self, worker: WatchedWorker) -> float:
        """How long it has waited for a core since the last tick."""
        before_s = worker.starved_s
        worker.starved_s = kernel.starved_s(worker.pid)
        return worker.starved_s - before_s

    def facts(self, worker: WatchedWorker) -> RankFacts:
        """The facts about a worker, as of the last tick. On the thread only."""
        reading = worker.reading
        if worker.page is not None and reading is None:
            reading = worker.page.read()
        return self._facts(worker, reading, _kernel_facts(worker))

    def _facts(
        self, worker: WatchedWorker, reading: Reading | None, of_kernel: KernelFacts
    ) -> RankFacts:
        first_rank = self._first_rank
        rank = -1 if reading is None else reading.rank
        if first_rank is not None:
            rank = first_rank + worker.local_rank
        phase = Phase.STARTING if reading is None else reading.phase
        longest_s = _UNKNOWN_S if reading is None else reading.longest_s
        typical_s = _UNKNOWN_S if reading is None else reading.typical_s
        return RankFacts(
            rank=rank,
            node=self._node,
            local_rank=worker.local_rank,
            pid=worker.pid,
            generation=0 if reading is None else reading.generation,
            step=0 if reading is None else reading.step,
            phase=phase,
            outer=Phase.STARTING if reading is None else reading.outer,
            flags=Flag.NONE if reading is None else _flags(reading),
            progress=0 if reading is None else reading.count,
            quiet_s=worker.quiet_s,
            idle_s=worker.idle_s,
            collective=0 if reading is None else reading.collective,
            operation="" if reading is None else operation_name(reading.operation),
            steps_in_world=0 if reading is None else reading.steps_in_world,
            longest_s=longest_s[phase],
            typical_s=typical_s[phase],
            longest_step_s=longest_s[Phase.COMPUTE],
            typical_step_s=typical_s[Phase.COMPUTE],
            collective_s=0.0 if reading is None else reading.collective_s,
            checkpoint_step=-1 if reading is None else reading.checkpoint_step,
            kernel=of_kernel,
        )


def _may_wait_for_others(reading: Reading) -> bool:
    """Whether other ranks may be the reason why this one makes no progress."""
    waits = (Phase.COLLECTIVE, Phase.FORMING, Phase.NO_WORLD, Phase.STARTING)
    on_device = bool(reading.flags & Flag.ON_STREAM) and reading.phase is not Phase.DATA
    return reading.phase in waits or on_device


def _flags(reading: Reading) -> Flag:
    waits = reading.phase is Phase.COLLECTIVE and is_on_host(reading.operation)
    return reading.flags | Flag.ON_HOST if waits else reading.flags


def _kernel_facts(worker: WatchedWorker) -> KernelFacts:
    pid, is_asleep = worker.pid, worker.state == "S"
    channel = kernel.wait_channel_of_sleeper(pid) if is_asleep else kernel.wait_channel(pid)
    is_blocked = worker.state == "D" or kernel.waits_for_fuse(channel)
    return KernelFacts(
        state=worker.state,
        tracer_pid=worker.tracer_pid,
        wait_channel=channel,
        file_system=kernel.file_system(pid) if is_blocked else "",
        call_target=kernel.call_target(pid),
        cpu_share=round(worker.cpu_share, 2),
        data_workers=kernel.data_workers(pid),
        data_worker_waits=kernel.data_worker_waits(pid),
    )
