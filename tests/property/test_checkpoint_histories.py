"""Random histories of saves, kills, storage faults, damage, policies and restarts.

Whatever happens, the newest checkpoint that was reported as saved, and those that the policy keeps,
can be loaded once the storage works again, unless their bytes were damaged. A job that starts finds
the newest one, or fails with the reason. The disk is as large as what the policy keeps and one
attempt; nothing else remains, and the first save after the last fault succeeds.
"""

from __future__ import annotations

import contextlib
import errno
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.manual_clock import ManualClock

import checkpoints
from checkpoints.names import CheckpointName, parse_attempt, parse_committed
from checkpoints.saving import WriterThreadDied
from checkpoints.storage import PatientStorage, WritableFile
from checkpoints.testing import FaultyStorage, MemoryStorage, SimulatedCrash
from elastic.errors import CheckpointRequired
from elastic.train.folder import CheckpointFolder

KEPT = 2
EVERY = 3
BEST = checkpoints.LatestN(1) | checkpoints.BestN(1, "loss")
MILESTONES = checkpoints.LatestN(1) | checkpoints.EveryNSteps(EVERY)
POLICIES = (checkpoints.LatestN(KEPT), BEST, MILESTONES)
ERRORS = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.ETIMEDOUT)
WRITES = ("make_folder", "create", "write", "sync", "close", "rename", "remove")
FOREVER_S = 1e9
WEIGHTS = 2048
ONE_BYTES = 4 * WEIGHTS + 4000  # of a checkpoint whose parts were not removed, and many worlds


class Disk(MemoryStorage):
    """A disk with so much space."""

    left_bytes = 1 << 30  # before its content

    def create(self, path: str) -> WritableFile:
        file = super().create(path)

        def write(data: bytes | memoryview) -> None:
            if self.used_bytes() + len(data) > self.left_bytes:
                raise OSError(errno.ENOSPC, "no space left", path)
            file.write(data)

        return SimpleNamespace(write=write, sync=file.sync, close=file.close)

    def used_bytes(self) -> int:
        return sum(map(self._size_bytes, self.list("")))

    def _size_bytes(self, entry: str) -> int:
        with contextlib.suppress(FileNotFoundError):
            return sum(self.size(f"{entry}/{file}") for file in self.list(entry))
        return self.size(entry)


@dataclass
class Fault:
    """An error of some calls: for one call, or for a time."""

    number: int
    begin: int  # skips so many calls first
    duration_s: float  # 0: one call
    kind: str = ""  # of the calls that fail, such as "open"; "": all

    def strikes(self, label: str) -> bool:
        if self.kind not in ("", label.partition(" ")[0]):
            return False
        if self.number == errno.ENOSPC and not label.startswith(WRITES[:4]):
            return False  # a full disk can be read, and files can be removed
        self.begin -= 1
        return self.begin < 0


@dataclass
class Job:
    """A job that saves into a storage with faults, and what it was told."""

    keep: checkpoints.RetentionFunction
    has_memory: bool = False  # it also looks for checkpoints in the memory of nodes
    disk: Disk = field(default_factory=Disk)
    clock: ManualClock = field(default_factory=ManualClock)
    fault: Fault | None = None
    fault_until_s: float = 0.0
    others_bytes: int = 0  # of the disk, taken by others
    dies_in: int | None = None
    generation: int = 1
    lineage: checkpoints.Lineage = ()
    step: int = 0
    last_step: int = 0
    reported: dict[str, float] = field(default_factory=dict)  # names and their content
    milestones: set[str] = field(default_factory=set)  # of this world
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

    def share_disk(self, others_bytes: int) -> None:
        """The disk has space for what the policy keeps and for one attempt, less what others
        take."""
        damaged = len([name for name in self.damaged if name in self.disk.list("")])
        self.disk.left_bytes = (self.most_kept() + 1 + damaged) * ONE_BYTES - others_bytes

    def most_kept(self) -> int:
        """How many checkpoints the policy may keep."""
        if self.keep is MILESTONES:
            return 1 + self.generation * (self.last_step // EVERY)
        return KEPT

    def save(self, writers: int, *, steps: int = 1, by_engine: bool = False) -> bool:
        """One save by all writers in turn, so many steps later; whether the last one reported a
        commit.

        ``by_engine``: the last writer saves asynchronously, unless one before has failed.
        """
        self.step += steps
        self.last_step = max(self.step, self.last_step)
        self.share_disk(self.others_bytes)
        committed = ""
        value = float(self.step * 1000 + self.generation)
        state = {"weight": torch.full((WEIGHTS,), value), "loss": loss_of(value)}
        is_milestone = self.step // EVERY not in {
            0,
            *(name.step // EVERY for name in map(parse_committed, self.disk.list("")) if name),
        }
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
            if is_milestone:
                self.milestones.add(committed)
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
        reported: list[str] = []
        folder = CheckpointFolder(
            self.storage, lambda name, _: reported.append(name), memory=self.has_memory
        )
        world: Any = SimpleNamespace(generation=self.generation + 1, nonce="x")
        best = self.best()
        lineage: checkpoints.Lineage = ()
        step = 0
        try:
            source = folder.resolve(world, required=False)
            if source.name is not None:
                found = folder.load(source.name).info
                lineage = checkpoints.derive_lineage(found, source.generation)
                step = found.step
        except (checkpoints.LoadError, CheckpointRequired) as error:
            assert error.hint  # the job does not start: nothing is lost
            return
        if best is not None:
            # It is found, or a fault is reported: there is no silent start from step 0.
            assert source.name is not None
            assert not _older(source.name, best) or best in reported
        self.generation, self.lineage, self.step = source.generation, lineage, step
        self.milestones = set()

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
            self.milestones -= {name}

    def check_nothing_is_lost(self) -> None:
        best = self.best()
        if best is None:
            return
        if best in self.disk.list(""):
            self._check_loadable(best)
        else:  # one whose commit could not be reported has replaced it
            newest = checkpoints.latest(self.disk).checkpoint
            assert newest is not None and _older(best, newest.name)
        if self.keep is BEST and not self.damaged:  # retention does not look for flipped bits
            names = [entry for entry in self.disk.list("") if parse_committed(entry)]
            losses = [checkpoints.load(self.disk, name).state["loss"] for name in names]
            assert min(losses) <= min(map(loss_of, self.reported.values()))
        if self.keep is MILESTONES:
            exact = {n for n in self.reported if _parsed(n).step % EVERY == 0 < _parsed(n).step}
            for name in (exact | self.milestones) - self.damaged:
                self._check_loadable(name)

    def _check_loadable(self, name: str) -> None:
        state = checkpoints.load(self.disk, name).state
        assert torch.equal(state["weight"], torch.full((WEIGHTS,), self.reported[name]))

    def check_after_the_last_fault(self, *, restarts: bool) -> None:
        self.repair()
        self.others_bytes = 0
        if restarts:
            self.restart()
        self.check_nothing_is_lost()
        assert self.save(2)
        assert self.save(1, by_engine=True)
        self.check_nothing_is_lost()
        entries = self.disk.list("")
        assert [entry for entry in entries if parse_attempt(entry)] == []
        if restarts:  # a record that could neither be written nor removed waits for the collection
            assert [entry for entry in entries if entry.startswith(".tmp-")] == []
        committed = {entry for entry in entries if parse_committed(entry)}
        assert len(committed - self.damaged) <= self.most_kept()


def loss_of(value: float) -> float:
    """The loss of a state, neither falling nor rising."""
    return value * 7919 % 97


def _parsed(name: str) -> CheckpointName:
    parsed = parse_committed(name)
    assert parsed is not None
    return parsed


def _older(name: str, other: str) -> bool:
    return _parsed(name).age_order < _parsed(other).age_order


EVENTS = st.one_of(
    st.tuples(st.just("save"), st.tuples(st.integers(1, 2), st.integers(1, 4))),
    st.tuples(st.just("save by engine"), st.tuples(st.integers(1, 2), st.integers(1, 4))),
    st.tuples(st.just("kill"), st.integers(0, 60)),
    st.tuples(st.just("kill engine"), st.integers(0, 60)),
    st.tuples(
        st.just("fault"),
        st.builds(
            Fault,
            st.sampled_from(ERRORS),
            st.integers(0, 60),
            st.sampled_from([0, 1.0, FOREVER_S]),
            st.sampled_from(["", "list", "open", "read", "create", "write", "rename", "remove"]),
        ),
    ),
    st.tuples(st.just("others"), st.sampled_from([0, ONE_BYTES // 2, 2 * ONE_BYTES])),
    st.tuples(st.just("repair"), st.none()),
    st.tuples(st.just("damage"), st.integers(0, 20)),
    st.tuples(st.just("restart"), st.none()),
)


@given(
    keep=st.sampled_from(POLICIES),
    has_memory=st.booleans(),
    events=st.lists(EVENTS, max_size=12),
    restarts=st.booleans(),
)
def test_no_history_loses_what_was_reported_as_saved(
    keep: checkpoints.RetentionFunction,
    has_memory: bool,
    events: list[tuple[str, Any]],
    restarts: bool,
) -> None:
    job = Job(keep, has_memory)
    for kind, value in events:
        by_engine = kind.endswith("engine")
        if kind.startswith("save"):
            writers, steps = value
            job.save(writers, steps=steps, by_engine=by_engine)
        elif kind.startswith("kill"):
            job.dies_in = value
            try:
                job.save(2, by_engine=by_engine)
            except SimulatedCrash:
                job.restart()
            job.dies_in = None
        elif kind == "fault":
            job.repair()
            job.fault = Fault(value.number, value.begin, value.duration_s, value.kind)
        elif kind == "repair":
            job.repair()
        elif kind == "others":
            job.others_bytes = value
        elif kind == "damage":
            job.damage(value)
        else:
            job.restart()
        job.check_nothing_is_lost()
    job.check_after_the_last_fault(restarts=restarts)


@pytest.mark.parametrize("duration_s", [0, 1.0, FOREVER_S])
@pytest.mark.parametrize(
    ("keep", "has_memory"), [(POLICIES[0], False), (BEST, True), (MILESTONES, True)]
)
def test_a_fault_of_any_call_loses_nothing(
    duration_s: float, keep: checkpoints.RetentionFunction, has_memory: bool
) -> None:
    """Each call of a save and a restart in turn fails, and each one of its kind: once, for a
    second, or until repaired."""
    undisturbed = _saved_and_restarted(keep, has_memory, None)
    kinds = [label.partition(" ")[0] for label in undisturbed.calls]
    assert len(kinds) > 60
    for at, kind in enumerate(kinds):
        for fault in (
            Fault(errno.EIO, at, duration_s),
            Fault(errno.ENOSPC, at, duration_s),
            Fault(errno.EIO, kinds[:at].count(kind), duration_s, kind),
        ):
            job = _saved_and_restarted(keep, has_memory, fault)
            job.check_nothing_is_lost()
            job.check_after_the_last_fault(restarts=at % 2 == 0)


def _saved_and_restarted(
    keep: checkpoints.RetentionFunction, has_memory: bool, fault: Fault | None
) -> Job:
    job = Job(keep, has_memory)
    job.save(2)
    job.calls, job.fault = [], fault
    job.save(2)
    job.restart()
    return job
