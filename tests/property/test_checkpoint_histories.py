"""Random histories of saves, kills, storage faults, damage, policies and restarts.

Whatever happens, the newest checkpoint that was reported as saved can be loaded once the storage
works again, unless its bytes were damaged; nothing else remains than what the policy keeps; and the
first save after the last fault succeeds.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.manual_clock import ManualClock

import checkpoints
from checkpoints.names import CheckpointName, parse_attempt, parse_committed
from checkpoints.saving import WriterThreadDied
from checkpoints.storage import PatientStorage
from checkpoints.testing import FaultyStorage, MemoryStorage, SimulatedCrash

KEPT = 2
POLICIES = (
    checkpoints.LatestN(KEPT),
    checkpoints.LatestN(1) | checkpoints.BestN(1, "loss"),
    checkpoints.LatestN(1) | checkpoints.EveryNSteps(10_000),
)
ERRORS = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.ETIMEDOUT)
WRITES = ("make_folder", "create", "write", "sync", "close", "rename", "remove")
FOREVER_S = 1e9


@dataclass
class Fault:
    """An error of some calls: for one call, or for a time."""

    number: int
    begin: int  # skips so many calls first
    duration_s: float  # 0: one call

    def strikes(self, label: str) -> bool:
        if self.number == errno.ENOSPC and not label.startswith(WRITES[:4]):
            return False  # a full disk can be read, and files can be removed
        self.begin -= 1
        return self.begin < 0


@dataclass
class Job:
    """A job that saves into a storage with faults, and what it was told."""

    keep: checkpoints.RetentionFunction
    disk: MemoryStorage = field(default_factory=MemoryStorage)
    clock: ManualClock = field(default_factory=ManualClock)
    fault: Fault | None = None
    fault_until_s: float = 0.0
    dies_in: int | None = None
    generation: int = 1
    lineage: checkpoints.Lineage = ()
    step: int = 0
    reported: dict[str, float] = field(default_factory=dict)  # names and their content
    damaged: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)

    @property
    def storage(self) -> PatientStorage:
        return PatientStorage(FaultyStorage(self.disk, before=self._before), clock=self.clock)

    def _before(self, label: str) -> None:
        self.calls.append(label)
        if self.dies_in is not None:
            self.dies_in -= 1
            if self.dies_in < 0:
                raise SimulatedCrash(label)
        if self.fault is None or not self.fault.strikes(label):
            return
        if not self.fault_until_s:
            self.fault_until_s = self.clock.monotonic() + self.fault.duration_s
        number = self.fault.number
        if self.fault.duration_s == 0 or self.clock.monotonic() > self.fault_until_s:
            is_over = self.fault.duration_s > 0
            self.repair()
            if is_over:
                return
        raise OSError(number, "injected", label)

    def repair(self) -> None:
        self.fault, self.fault_until_s = None, 0.0

    def save(self, writers: int, *, by_engine: bool = False) -> bool:
        """One save by all writers in turn; whether the last one reported a commit.

        ``by_engine``: the last writer saves asynchronously, unless one before has failed.
        """
        self.step += 1
        committed = ""
        value = float(self.step * 1000 + self.generation)
        state = {"weight": torch.full((8,), value), "loss": 1.0 / self.step}
        for rank in range(writers):
            world = checkpoints.WriterGroup(
                nonce=f"g{self.generation}",
                generation=self.generation,
                rank=rank,
                size=writers,
                lineage=self.lineage,
            )
            try:
                if by_engine and rank == writers - 1:
                    committed = self._save_by_engine(state, world)
                else:
                    committed = self._save(state, world)
            except checkpoints.SaveError as error:
                assert error.hint
                by_engine = False
                committed = ""
        if committed:
            self.reported[committed] = value
        return bool(committed)

    def _save(self, state: object, world: checkpoints.WriterGroup) -> str:
        saved = checkpoints.save(
            self.storage,
            state,
            step=self.step,
            nonce=world.nonce,
            generation=world.generation,
            lineage=world.lineage,
            rank=world.rank,
            world_size=world.size,
            keep=self.keep,
        )
        return saved.name if saved.committed else ""

    def _save_by_engine(self, state: object, world: checkpoints.WriterGroup) -> str:
        engine = checkpoints.Engine(
            self.storage, keep=self.keep, deadline_s=10.0, monotonic=self.clock.monotonic
        )
        handle = engine.save_async(state, step=self.step, world=world)
        try:
            engine.close()
        except WriterThreadDied as death:
            assert isinstance(death.__cause__, SimulatedCrash)
            raise death.__cause__ from death
        assert handle.outcome is not None
        if handle.outcome.status is checkpoints.SaveStatus.COMMITTED:
            return handle.name
        assert handle.outcome.reason
        return ""

    def restart(self) -> None:
        """As a new world does: collect garbage, find the newest, continue from it."""
        self.dies_in = None
        generation = self.generation + 1
        try:
            checkpoints.collect_garbage(self.storage, generation=generation, nonce="x")
            found = checkpoints.latest(self.storage)
        except checkpoints.LoadError as error:
            assert error.hint  # the job does not start: nothing is lost
            return
        best = self.best()
        if best is not None:
            # It is found, or a fault is reported: there is no silent start from step 0.
            is_found = found.checkpoint is not None and not _older(found.checkpoint.name, best)
            assert is_found or best in [skipped.name for skipped in found.skipped]
        if found.checkpoint is None:
            if best is None:
                self.generation, self.lineage, self.step = generation, (), 0
            return
        self.lineage = checkpoints.derive_lineage(found.checkpoint, generation)
        self.generation, self.step = generation, found.checkpoint.step

    def best(self) -> str | None:
        """The newest reported checkpoint whose bytes are as they were written."""
        intact = [name for name in self.reported if name not in self.damaged]
        return max(intact, key=lambda name: _parsed(name).age_order, default=None)

    def damage(self, index: int) -> None:
        names = sorted(entry for entry in self.disk.list("") if parse_committed(entry))
        if names:
            name = names[index % len(names)]
            files = sorted(self.disk.list(name))
            self.disk.contents(f"{name}/{files[index % len(files)]}")[-2] ^= 1
            self.damaged.add(name)
            # What the policy has removed before cannot replace it.
            self.reported = {n: value for n, value in self.reported.items() if n in names}

    def check_nothing_is_lost(self) -> None:
        best = self.best()
        if best is not None:
            state = checkpoints.load(self.disk, best).state
            assert torch.equal(state["weight"], torch.full((8,), self.reported[best]))

    def check_after_the_last_fault(self) -> None:
        self.repair()
        self.restart()
        self.check_nothing_is_lost()
        assert self.save(2)
        assert self.save(1, by_engine=True)
        self.check_nothing_is_lost()
        entries = self.disk.list("")
        assert [entry for entry in entries if parse_attempt(entry)] == []
        assert [entry for entry in entries if entry.startswith(".tmp-")] == []
        committed = {entry for entry in entries if parse_committed(entry)}
        assert len(committed - self.damaged) <= KEPT


def _parsed(name: str) -> CheckpointName:
    parsed = parse_committed(name)
    assert parsed is not None
    return parsed


def _older(name: str, other: str) -> bool:
    return _parsed(name).age_order < _parsed(other).age_order


EVENTS = st.one_of(
    st.tuples(st.just("save"), st.integers(1, 2)),
    st.tuples(st.just("save by engine"), st.integers(1, 2)),
    st.tuples(st.just("kill"), st.integers(0, 60)),
    st.tuples(st.just("kill engine"), st.integers(0, 60)),
    st.tuples(
        st.just("fault"),
        st.builds(
            Fault, st.sampled_from(ERRORS), st.integers(0, 60), st.sampled_from([0, 1.0, FOREVER_S])
        ),
    ),
    st.tuples(st.just("repair"), st.none()),
    st.tuples(st.just("damage"), st.integers(0, 20)),
    st.tuples(st.just("restart"), st.none()),
)


@given(keep=st.sampled_from(POLICIES), events=st.lists(EVENTS, max_size=12))
def test_no_history_loses_what_was_reported_as_saved(
    keep: checkpoints.RetentionFunction, events: list[tuple[str, object]]
) -> None:
    job = Job(keep)
    for kind, value in events:
        by_engine = kind.endswith("engine")
        if kind.startswith("save"):
            assert isinstance(value, int)
            job.save(value, by_engine=by_engine)
        elif kind.startswith("kill"):
            assert isinstance(value, int)
            job.dies_in = value
            try:
                job.save(2, by_engine=by_engine)
            except SimulatedCrash:
                job.restart()
            job.dies_in = None
        elif kind == "fault":
            assert isinstance(value, Fault)
            job.repair()
            job.fault = Fault(value.number, value.begin, value.duration_s)
        elif kind == "repair":
            job.repair()
        elif kind == "damage":
            assert isinstance(value, int)
            job.damage(value)
        else:
            job.restart()
        job.check_nothing_is_lost()
    job.check_after_the_last_fault()


@pytest.mark.parametrize("duration_s", [0, 1.0, FOREVER_S])
def test_a_fault_of_any_call_loses_nothing(duration_s: float) -> None:
    """Each call of a save and a restart in turn fails: once, for a second, or until repaired."""
    undisturbed = _saved_and_restarted(None)
    assert len(undisturbed.calls) > 60
    for number in (errno.EIO, errno.ENOSPC):
        for begin in range(len(undisturbed.calls)):
            job = _saved_and_restarted(Fault(number, begin, duration_s))
            job.check_nothing_is_lost()
            job.check_after_the_last_fault()


def _saved_and_restarted(fault: Fault | None) -> Job:
    job = Job(POLICIES[0])
    job.save(2)
    job.calls, job.fault = [], fault
    job.save(2)
    job.restart()
    return job
