"""Random histories of saves, kills, storage faults, damage, policies and restarts.

Whatever happens, the newest checkpoint that was reported as saved, and those that the policy keeps,
can be loaded once the storage works again, unless their bytes were damaged. A job that starts finds
the newest one, in spite of a passing fault, or fails with the reason; it never starts over. The
disk is as large as what the policy keeps and one attempt; nothing else remains, and the first save
after the last fault succeeds.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import operator
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.checkpoint_states import PartsInMemory
from kit.manual_clock import ManualClock

import checkpoints
from checkpoints.commit import read_manifest
from checkpoints.names import (
    LATEST,
    LATEST_PREFIX,
    MANIFEST,
    CheckpointName,
    parse_attempt,
    parse_committed,
)
from checkpoints.saving import WriterThreadDied
from checkpoints.storage import PatientStorage, Storage, WritableFile
from checkpoints.testing import FaultyStorage, MemoryStorage, SimulatedCrash
from checkpoints.tiers import TieredStorage
from elastic.errors import CheckpointRequired
from elastic.train.folder import GENERATION_FILE, CheckpointFolder

ERRORS = (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.ETIMEDOUT)
WRITES = ("make_folder", "create", "write", "sync", "close", "rename", "remove")
PASSING_S = 1.0
LONGER_S = 4.0  # than reads are repeated
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

    def committed(self) -> set[str]:
        return {entry for entry in self.list("") if parse_committed(entry)}

    def _size_bytes(self, entry: str) -> int:
        with contextlib.suppress(FileNotFoundError):
            return sum(self.size(f"{entry}/{file}") for file in self.list(entry))
        return self.size(entry)


class Folder(CheckpointFolder):
    """The job's folder, and the memory of nodes that is given."""

    nodes: PartsInMemory

    @contextlib.contextmanager
    def _readable(self) -> Iterator[Storage]:
        yield TieredStorage([self.nodes, self._reads]) if self.has_memory else self._reads


@dataclass(frozen=True)
class Keep:
    """A combination of retention policies; 0: without that one."""

    latest: int = 0
    best: int = 0
    steps: int = 0
    seconds: int = 0

    @property
    def policy(self) -> checkpoints.RetentionPolicy:
        parts: list[checkpoints.RetentionPolicy] = []
        parts += [checkpoints.LatestN(self.latest)] if self.latest else []
        parts += [checkpoints.BestN(self.best, "loss")] if self.best else []
        parts += [checkpoints.EveryNSteps(self.steps)] if self.steps else []
        parts += [checkpoints.EveryNSeconds(self.seconds)] if self.seconds else []
        return functools.reduce(operator.or_, parts)


SINGLE = {
    "latest": Keep(latest=2),
    "best": Keep(best=1),
    "steps": Keep(steps=2),
    "seconds": Keep(seconds=60),
}
LATEST_2 = SINGLE["latest"]
BEST = Keep(latest=1, best=1)
MILESTONES = Keep(latest=1, steps=3)
TIMES = Keep(seconds=60)
ALL = Keep(latest=2, best=2, steps=4, seconds=90)


@dataclass
class Fault:
    """An error of some calls: for one call, or for a time."""

    number: int
    begin: int  # skips so many calls first
    duration_s: float  # 0: one call
    kind: str = ""  # of the calls that fail, such as "open"; "": all
    place: str = ""  # only calls for paths with this text

    @property
    def hinders_reads(self) -> bool:
        """Whether it may fail a read for longer than reads are repeated."""
        is_of_reads = self.number != errno.ENOSPC and self.kind not in WRITES
        return self.duration_s > PASSING_S and is_of_reads

    def strikes(self, label: str) -> bool:
        if self.kind not in ("", label.partition(" ")[0]) or self.place not in label:
            return False
        if self.number == errno.ENOSPC and not label.startswith(WRITES[:4]):
            return False  # a full disk can be read, and files can be removed
        self.begin -= 1
        return self.begin < 0


@dataclass
class Job:
    """A job that saves into a storage with faults, and what it was told."""

    keep: Keep
    has_memory: bool = False  # it also looks for checkpoints in the memory of nodes
    disk: Disk = field(default_factory=Disk)
    memory: PartsInMemory = field(default_factory=PartsInMemory)
    saves_to_memory: bool = False
    clock: ManualClock = field(default_factory=ManualClock)
    wall_offset_s: float = 1e9
    has_jumped: bool = False  # the wall clock
    fault: Fault | None = None
    fault_until_s: float = 0.0
    others_bytes: int = 0  # of the disk, taken by others
    dies_in: int | None = None
    generation: int = 1
    lineage: checkpoints.Lineage = ()
    step: int = 0
    last_step: int = 0
    saves: int = 0
    reported: set[str] = field(default_factory=set)  # names
    times_s: dict[str, float] = field(default_factory=dict)  # of all names
    milestones: set[str] = field(default_factory=set)  # of this world
    damaged: set[str] = field(default_factory=set)
    flipped: set[str] = field(default_factory=set)  # of them, those that only a load notices
    calls: list[str] = field(default_factory=list)
    engine: checkpoints.Engine | None = None  # of this process

    @property
    def storage(self) -> PatientStorage:
        return PatientStorage(FaultyStorage(self.disk, before=self._before), clock=self.clock)

    def wall_s(self) -> float:
        return self.clock.monotonic() + self.wall_offset_s

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

    def begin_fault(self, fault: Fault, *, only_at: int | None = None) -> None:
        """``only_at``: the fault is of the files of one checkpoint, the so many newest one."""
        self.repair()
        names = sorted(self.disk.committed(), key=_age, reverse=True)
        place = fault.place
        if only_at is not None and only_at < len(names):
            place = names[only_at]
        self.fault = Fault(fault.number, fault.begin, fault.duration_s, fault.kind, place)

    def repair(self) -> None:
        self.fault, self.fault_until_s = None, 0.0

    def jump(self, seconds: float) -> None:
        self.wall_offset_s += seconds
        self.has_jumped = True

    def share_disk(self, others_bytes: int) -> None:
        """The disk has space for what the policy keeps and for one attempt, less what others
        take."""
        damaged = len(self.damaged & self.disk.committed())
        self.disk.left_bytes = (self.most_kept() + 1 + damaged) * ONE_BYTES - others_bytes

    def most_kept(self) -> int:
        """How many checkpoints the policy may keep."""
        keep = self.keep
        most = max(keep.latest, 1) + keep.best
        if keep.steps:
            most += self.generation * (self.last_step // keep.steps)
        if keep.seconds and self.has_jumped:
            most += self.saves
        elif keep.seconds:
            most += int(self.clock.monotonic()) // keep.seconds + 2
        return most

    def save(
        self,
        writers: int,
        *,
        steps: int = 1,
        seconds: float = 0,
        by_engine: bool = False,
        absent: int = 0,
    ) -> bool:
        """One save by all writers in turn, so many steps and seconds later; whether the last one
        reported a commit.

        ``by_engine``: the last writer saves asynchronously, unless one before has failed.
        ``absent``: so many writers do not take part.
        """
        self.step += steps
        self.last_step = max(self.step, self.last_step)
        self.saves += 1
        self.clock.advance(seconds)
        self.share_disk(self.others_bytes)
        committed = ""
        state = state_of(CheckpointName(self.step, self.generation, "x"))
        is_milestone = self._begins_a_block()
        for rank in range(writers - absent):
            world = checkpoints.WriterGroup(
                nonce=f"g{self.generation}",
                generation=self.generation,
                rank=rank,
                size=writers,
                lineage=self.lineage,
            )
            if self.saves_to_memory:
                self._save(self.memory, state, world)
            try:
                if by_engine and rank == writers - 1:
                    committed = self._save_by_engine(state, world)
                else:
                    committed = self._save(self.storage, state, world)
            except checkpoints.SaveError as error:
                assert error.hint
                self._check_nothing_takes_space(rank)
                by_engine = False
                committed = ""
        if committed:
            self.reported.add(committed)
            self._note_times()
            if is_milestone or self._begins_an_interval(committed):
                self.milestones.add(committed)
        return bool(committed)

    def _check_nothing_takes_space(self, rank: int) -> None:
        """An incomplete share is removed at once, unless removals may fail, too. A complete one
        may be committed by another writer at any time."""
        if self.fault is None or self.fault.number != errno.ENOSPC:
            return
        for entry in self.disk.list(""):
            name = parse_attempt(entry)
            if name is not None and (name.step, name.generation) == (self.step, self.generation):
                files = [
                    f for f in self.disk.list(entry) if f.removeprefix("part-")[:5] == f"{rank:05}"
                ]
                assert files == [] or any(f.endswith(".json") for f in files)

    def _begins_a_block(self) -> bool:
        """Whether the save is the first at or after a multiple of the policy's steps."""
        if not (every := self.keep.steps):
            return False
        blocks = {_parsed(name).step // every for name in self.disk.committed()}
        return self.step // every not in {0, *blocks}

    def _begins_an_interval(self, name: str) -> bool:
        """Whether the checkpoint is the first in its interval of the policy's seconds."""
        if not (every := self.keep.seconds):
            return False
        others = (self.disk.committed() & self.times_s.keys()) - {name}
        return self.times_s[name] // every not in {self.times_s[o] // every for o in others}

    def _save(self, storage: Storage, state: object, world: checkpoints.WriterGroup) -> str:
        saved = checkpoints.save(
            storage,
            state,
            step=self.step,
            nonce=world.nonce,
            generation=world.generation,
            lineage=world.lineage,
            rank=world.rank,
            world_size=world.size,
            keep=self.keep.policy,
            clock=self.wall_s,
        )
        return saved.name if saved.committed else ""

    def _save_by_engine(self, state: object, world: checkpoints.WriterGroup) -> str:
        self.engine = self.engine or checkpoints.Engine(
            self.storage,
            keep=self.keep.policy,
            deadline_s=10.0,
            clock=self.wall_s,
            monotonic=self.clock.monotonic,
        )
        handle = self.engine.save_async(state, step=self.step, world=world)
        try:
            self.engine.wait()
            is_idle = threading.Event()  # an abandoned save may still be removing its files
            self.engine.submit(is_idle.set)
            while not is_idle.wait(0.01):
                self.engine.outcomes()  # raises if the thread has died
        except WriterThreadDied as death:
            assert isinstance(death.__cause__, SimulatedCrash)
            raise death.__cause__ from death
        assert handle.outcome is not None
        if handle.outcome.status is checkpoints.SaveStatus.COMMITTED:
            return handle.name
        assert handle.outcome.reason
        return ""

    def prune(self) -> None:
        """On request; every byte is verified."""
        before = self.disk.committed() - self.damaged
        with contextlib.suppress(checkpoints.LoadError, checkpoints.SaveError):
            checkpoints.prune(self.storage, self.keep.policy)
        left = self.disk.committed() - self.damaged
        for name in before - left:
            assert len(_newer(left, name)) >= max(self.keep.latest, 1)

    def restart(self) -> None:
        """As a new process does: collect garbage, find the newest, continue from it."""
        self.dies_in = None
        self.end_process()
        reported: list[str] = []
        folder = Folder(self.storage, lambda name, _: reported.append(name), memory=self.has_memory)
        folder.nodes = self.memory
        world: Any = SimpleNamespace(generation=1, nonce="x")  # as a launcher without etcd
        best = self.best()
        fault, damaged_only = self.fault, not self.disk.committed() - self.damaged
        lineage: checkpoints.Lineage = ()
        step = 0
        try:
            source = folder.resolve(world, required=False)
            if source.name is not None:
                loaded = folder.load(source.name)
                assert _same(loaded.state, state_of(_parsed(source.name)))
                lineage = checkpoints.derive_lineage(loaded.info, source.generation)
                step = loaded.info.step
        except (checkpoints.LoadError, CheckpointRequired) as error:
            assert error.hint  # the job does not start: nothing is lost
            is_missing = isinstance(error, CheckpointRequired)
            assert damaged_only or not (is_missing or self._can_start_in(fault)), error
            return
        present = self.disk.committed()
        assert source.generation > max((_parsed(n).generation for n in present), default=0)
        if source.name is None:  # a start from step 0
            assert present == set()
            assert LATEST not in self.disk.list("")
        elif best is not None and _age(source.name) < _age(best):
            assert best in reported
            assert fault is not None and fault.hinders_reads
        self.generation, self.lineage, self.step = source.generation, lineage, step
        self.milestones = set()

    def end_process(self) -> None:
        if self.engine is not None:
            with contextlib.suppress(WriterThreadDied):
                self.engine.close()
            self.engine = None

    def _can_start_in(self, fault: Fault | None) -> bool:
        """Whether the fault leaves a checkpoint that can be loaded. Not if it may be one in the
        content of the newest, of which only its load learns."""
        if self.flipped & self.disk.committed():
            return False
        if fault is None or not fault.hinders_reads:
            return True
        return bool(fault.place and self.disk.committed() - self.damaged - {fault.place})

    def best(self) -> str | None:
        """The newest reported checkpoint whose bytes are as they were written."""
        intact = [name for name in self.reported if name not in self.damaged]
        return max(intact, key=_age, default=None)

    def damage(self, index: int, how: str) -> None:
        self._note_times()
        names = sorted(self.disk.committed(), key=_age)
        if not names:
            return
        name = names[index % len(names)]
        tensors = sorted(file for file in self.disk.list(name) if file.endswith(".safetensors"))
        if name in self.damaged or not tensors:
            return
        file = f"{name}/{tensors[index % len(tensors)]}"
        if how == "flip":
            self.disk.contents(file)[-2] ^= 1
            self.flipped.add(name)
        elif how == "truncate":
            del self.disk.contents(file)[-2:]
        elif how == "remove":
            self.disk.remove(file)
        else:
            self.disk.contents(f"{name}/{MANIFEST}")[-2] ^= 1
        self.damaged.add(name)
        self._forget_removed()

    def remove_records(self) -> None:
        """Someone copies the checkpoints without the other files."""
        for entry in (LATEST, GENERATION_FILE):
            with contextlib.suppress(FileNotFoundError):
                self.disk.remove(entry)

    def wipe(self) -> None:
        """Someone removes all checkpoints."""
        for name in self.disk.committed():
            self.disk.remove_folder(name)
        self._forget_removed()
        self.times_s, self.damaged, self.flipped = {}, set(), set()  # names may be used again

    def _forget_removed(self) -> None:
        """What the policy has removed before cannot replace what is now damaged."""
        names = self.disk.committed()
        self.reported &= names
        self.milestones &= names - self.damaged

    def check_nothing_is_lost(self) -> None:
        self._note_times()
        present = self.disk.committed()
        # Retention does not look for flipped bits, and an engine for no later damage.
        unseen = self.damaged if self.engine is not None else self.flipped
        counted = present - (self.damaged - unseen)
        for name in self.damaged - present:  # kept as if it were valid
            assert len(_newer(present, name)) >= max(self.keep.latest, 1)
        intact = self.reported - self.damaged
        for name in intact:
            if name in present:
                loaded = checkpoints.load(self.disk, name).state
                assert _same(loaded, state_of(_parsed(name)))
                continue
            assert len(_newer(counted, name)) >= max(self.keep.latest, 1)
            assert _newer(present - self.damaged, name)
            if self.keep.seconds:
                times_s = [abs(self.times_s[other] - self.times_s[name]) for other in counted]
                assert min(times_s) < self.keep.seconds
        if self.keep.best:
            losses = sorted(loss_of(_parsed(name)) for name in counted)[: self.keep.best]
            best = sorted(loss_of(_parsed(name)) for name in intact)[: self.keep.best]
            assert all(a <= b for a, b in zip(losses, best, strict=False))
            assert len(losses) >= len(best)
        if every := self.keep.steps:
            assert {name for name in intact if _parsed(name).step % every == 0} <= present
        assert self.milestones - self.damaged <= present

    def _note_times(self) -> None:
        for name in self.disk.committed() - self.damaged - self.times_s.keys():
            self.times_s[name] = read_manifest(self.disk, name).wall_time_s

    def check_after_the_last_fault(self, *, restarts: bool, by_engine: bool = True) -> None:
        self.repair()
        self.others_bytes = 0
        if restarts:
            self.restart()
        self.check_nothing_is_lost()
        assert self.save(2)
        assert self.save(1, by_engine=by_engine)
        self.check_nothing_is_lost()
        entries = self.disk.list("")
        assert [entry for entry in entries if parse_attempt(entry)] == []
        if restarts:  # a record that could neither be written nor removed waits for the collection
            assert [entry for entry in entries if entry.startswith(".tmp-")] == []
        assert len(self.disk.committed() - self.damaged) <= self.most_kept()


def state_of(name: CheckpointName) -> dict[str, Any]:
    """The state that a job saves at that step, in that generation."""
    value = float(name.step * 1000 + name.generation)
    return {"weight": torch.full((WEIGHTS,), value), "loss": loss_of(name)}


def loss_of(name: CheckpointName) -> float:
    """The loss of a state, neither falling nor rising."""
    return (name.step * 1000 + name.generation) * 7919 % 97


def _same(state: Any, other: dict[str, Any]) -> bool:
    return bool(torch.equal(state["weight"], other["weight"]) and state["loss"] == other["loss"])


def _parsed(name: str) -> CheckpointName:
    parsed = parse_committed(name)
    assert parsed is not None
    return parsed


def _age(name: str) -> tuple[int, int, str]:
    return _parsed(name).age_order


def _newer(names: set[str], name: str) -> list[str]:
    return [other for other in names if _age(other) > _age(name)]


COMBINED = st.builds(
    Keep, st.integers(0, 3), st.integers(0, 2), st.sampled_from([0, 3, 4]), st.sampled_from([0, 60])
)
KEEPS = st.sampled_from(list(SINGLE.values())) | COMBINED.filter(lambda keep: keep != Keep())
DAMAGES = ("flip", "truncate", "remove", "manifest")
SAVES = st.tuples(st.integers(1, 2), st.integers(1, 4), st.sampled_from([0, 20, 70]))
KINDS = ("", "list", "open", "read", "close", "create", "write", "rename", "remove")
FAULTS = st.tuples(
    st.builds(
        Fault,
        st.sampled_from(ERRORS),
        st.one_of(st.integers(0, 7), st.integers(0, 60)),
        st.sampled_from([FOREVER_S, LONGER_S, PASSING_S, 0]),
        st.sampled_from(KINDS),
    ),
    st.none(),
)
UNLISTED = st.tuples(
    st.builds(
        Fault,
        st.just(errno.ESTALE),
        st.integers(0, 5),
        st.sampled_from([FOREVER_S, LONGER_S]),
        st.just("list"),
    ),
    st.none(),
)
UNREADABLE = st.tuples(
    st.builds(
        Fault,
        st.just(errno.EIO),
        st.integers(0, 1),
        st.just(FOREVER_S),
        st.sampled_from(["", "open", "read"]),
    ),
    st.integers(0, 3),
)
DAMAGE = st.tuples(st.integers(0, 20), st.sampled_from(DAMAGES))
EVENTS = st.one_of(
    st.tuples(st.just("save"), SAVES),
    st.tuples(st.just("save by engine"), SAVES),
    st.tuples(st.just("kill"), st.integers(0, 60)),
    st.tuples(st.just("kill engine"), st.integers(0, 60)),
    st.tuples(st.just("fault"), st.one_of(FAULTS, UNREADABLE)),
    st.tuples(st.just("restart in"), FAULTS),
    st.tuples(st.just("restart in"), UNREADABLE),
    st.tuples(st.just("restart in"), UNLISTED),
    st.tuples(st.just("save in"), UNREADABLE),
    st.tuples(st.just("others"), st.sampled_from([0, ONE_BYTES // 2, 2 * ONE_BYTES])),
    st.tuples(st.just("repair"), st.none()),
    st.tuples(st.just("damage"), DAMAGE),
    st.tuples(st.just("damage all"), st.sampled_from(DAMAGES)),
    st.tuples(st.just("prune"), st.none()),
    st.tuples(st.just("wipe"), st.none()),
    st.tuples(st.just("remove records"), st.none()),
    st.tuples(st.just("jump"), st.sampled_from([-1e6, -100.0, 1e6])),
    st.tuples(st.just("memory"), st.booleans()),
    st.tuples(st.just("restart"), st.none()),
)


@pytest.mark.parametrize("has_memory", [False, True])
@given(
    keep=KEEPS,
    saves=st.lists(SAVES, max_size=3),
    events=st.lists(EVENTS, max_size=14),
    restarts=st.booleans(),
)
def test_no_history_loses_what_was_reported_as_saved(
    has_memory: bool,
    keep: Keep,
    saves: list[tuple[int, int, int]],
    events: list[tuple[str, Any]],
    restarts: bool,
) -> None:
    job = Job(keep, has_memory)
    try:
        for kind, value in [("save", save) for save in saves] + events:
            _apply(job, kind, value)
            job.check_nothing_is_lost()
        job.check_after_the_last_fault(restarts=restarts)
    finally:
        job.end_process()


def _apply(job: Job, kind: str, value: Any) -> None:
    by_engine = kind.endswith("engine")
    if kind in ("restart in", "save in"):
        fault, only_at = value
        job.begin_fault(fault, only_at=only_at)
        job.restart() if kind == "restart in" else job.save(1)
        job.repair()
    elif kind.startswith("save"):
        writers, steps, seconds = value
        job.save(writers, steps=steps, seconds=seconds, by_engine=by_engine)
    elif kind.startswith("kill"):
        job.dies_in = value
        try:
            job.save(2, by_engine=by_engine)
        except SimulatedCrash:
            job.restart()
        job.dies_in = None
    elif kind == "fault":
        fault, only_at = value
        job.begin_fault(fault, only_at=only_at)
    elif kind == "others":
        job.others_bytes = value
    elif kind == "damage":
        job.damage(*value)
    elif kind == "damage all":
        for index in range(len(job.disk.committed())):
            job.damage(index, value)
        job.restart()
    elif kind == "jump":
        job.jump(value)
    elif kind == "memory":
        job.saves_to_memory = value and job.has_memory
        if not value:
            job.memory = PartsInMemory()
    else:
        getattr(job, kind.replace(" ", "_"))()


@pytest.mark.parametrize(
    ("keep", "has_memory", "duration_s"),
    [
        pytest.param(LATEST_2, True, FOREVER_S, id="latest-forever", marks=pytest.mark.slow),
        pytest.param(LATEST_2, False, 0, id="latest-once", marks=pytest.mark.slow),
        pytest.param(BEST, False, FOREVER_S, id="best-forever", marks=pytest.mark.slow),
        pytest.param(MILESTONES, True, PASSING_S, id="milestones-second", marks=pytest.mark.slow),
        pytest.param(TIMES, True, FOREVER_S, id="times-forever", marks=pytest.mark.slow),
        pytest.param(ALL, True, 0, id="all-once"),
        pytest.param(ALL, False, PASSING_S, id="all-second", marks=pytest.mark.slow),
    ],
)
def test_a_fault_of_any_call_loses_nothing(keep: Keep, has_memory: bool, duration_s: float) -> None:
    """Each call of a save and a restart in turn fails, and each one of its kind: once, for a
    second, or until repaired. Before, one of the checkpoints may be damaged."""
    undisturbed = _saved_and_restarted(keep, has_memory, None)
    kinds = [label.partition(" ")[0] for label in undisturbed.calls]
    assert len(kinds) > 60
    for at, kind in enumerate(kinds):
        for fault in (
            Fault(errno.EIO, at, duration_s),
            Fault(errno.ENOSPC, at, duration_s),
            Fault(errno.EIO, kinds[:at].count(kind), duration_s, kind),
        ):
            damage = (None, *DAMAGES)[at % (1 + len(DAMAGES))]
            job = _saved_and_restarted(keep, has_memory, fault, damage, at)
            job.check_nothing_is_lost()
            job.check_after_the_last_fault(restarts=at % 2 == 0)
            job.end_process()


def _saved_and_restarted(
    keep: Keep, has_memory: bool, fault: Fault | None, damage: str | None = None, index: int = 0
) -> Job:
    job = Job(keep, has_memory)
    for _ in range(2):
        job.save(2, seconds=50)
    if damage is not None:
        job.damage(index // 5, damage)
    job.calls, job.fault = [], fault
    job.save(2, seconds=50)
    job.restart()
    return job


# All histories of a few operations, one after another in every order, under one policy and with one
# kind of fault. Those that lead to the same folder and the same reports continue as one.

Operation = Callable[[Job], object]
OPERATIONS_OF_A_HISTORY = 3  # after three saves
EIO_OF_FILES = Fault(errno.EIO, 0, FOREVER_S, "open")
EIO_OF_REMOVALS = Fault(errno.EIO, 0, FOREVER_S, "remove_folder")
EIO_OF_LATEST = Fault(errno.EIO, 0, FOREVER_S, "rename", LATEST)
FULL = Fault(errno.ENOSPC, 0, FOREVER_S)
FULL_MEANWHILE = Fault(errno.ENOSPC, 1, FOREVER_S, "write")


def _save(job: Job) -> None:
    job.save(1, seconds=40)


def _save_half(job: Job) -> None:
    """One of two writers saves; the other one skips this save."""
    job.save(2, seconds=40, absent=1)


def _damage(how: str, *ages: int) -> Operation:
    """Damage the checkpoints of these ages, from 0 for the newest."""

    def operation(job: Job) -> None:
        newest_first = sorted(job.disk.committed(), key=_age, reverse=True)
        for age in ages:
            job.damage(len(newest_first) - 1 - age, how) if age < len(newest_first) else None

    return operation


def _in_fault(fault: Fault, act: Operation, only_at: int | None = None) -> Operation:
    def operation(job: Job) -> None:
        job.begin_fault(fault, only_at=only_at)
        act(job)
        job.repair()

    return operation


def _die(before_call: int) -> Operation:
    """The process dies in a save of two writers, and is restarted."""

    def operation(job: Job) -> None:
        job.dies_in = before_call
        with contextlib.suppress(SimulatedCrash):
            job.save(2, seconds=40)
        job.restart()

    return operation


def _save_without_latest(job: Job) -> None:
    _in_fault(EIO_OF_LATEST, _save)(job)
    assert not any(entry.startswith(LATEST_PREFIX) for entry in job.disk.list(""))


def _unlisted(act: Operation, duration_s: float = FOREVER_S, begin: int = 0) -> Operation:
    return _in_fault(Fault(errno.ESTALE, begin, duration_s, "list"), act)


def _damages(how: str) -> dict[str, Operation]:
    return {
        "damage newest": _damage(how, 0),
        "damage older": _damage(how, *range(1, 9)),
        "damage all": _damage(how, *range(9)),
        "remove records": Job.remove_records,
    }


ALWAYS: dict[str, Operation] = {"save": _save, "restart": Job.restart, "prune": Job.prune}
OPERATIONS: dict[str, dict[str, Operation]] = {
    "damaged manifests": _damages("manifest"),
    "flipped bits": _damages("flip"),
    "torn files": _damages("truncate"),
    "unreadable files": {
        f"{what} beside {age}": _in_fault(EIO_OF_FILES, act, age)
        for what, act in ALWAYS.items()
        for age in range(3)
    }
    | {"restart, read late": _in_fault(Fault(errno.EIO, 0, PASSING_S, "open"), Job.restart, 0)},
    "no listing": {
        "remove records": Job.remove_records,
        "wipe": Job.wipe,
        "unlisted save": _unlisted(_save),
        "unlisted prune": _unlisted(Job.prune),
        "unlisted restart": _unlisted(Job.restart),
        "restart, listed late": _unlisted(Job.restart, LONGER_S),
        "restart, unlisted later": _unlisted(Job.restart, begin=2),  # than the first look
    },
    "failed saves": {
        "save half": _save_half,
        "die before the commit": _die(46),
        "die after the commit": _die(50),
        "save until the disk is full": _in_fault(FULL_MEANWHILE, _save),
        "save without removals": _in_fault(EIO_OF_REMOVALS, _save),
        "save without LATEST": _save_without_latest,
        "restart on a full disk": _in_fault(FULL, Job.restart),
        "restart without removals": _in_fault(EIO_OF_REMOVALS, Job.restart),
    },
}


# Of faults that have little to do with what is kept.
POLICIES = {
    "torn files": ["latest", "best"],
    "no listing": ["latest", "best"],
    "failed saves": ["latest"],
}


@pytest.mark.parametrize(
    ("faults", "policy"),
    [(faults, policy) for faults in OPERATIONS for policy in POLICIES.get(faults, SINGLE)],
)
def test_no_order_of_a_few_operations_loses_anything(faults: str, policy: str) -> None:
    job = Job(SINGLE[policy])
    for _ in range(3):
        _save(job)
    operations = ALWAYS | OPERATIONS[faults]
    reached = {_state_of(job): (job, "3 saves")}
    latest = dict(reached)
    for _ in range(OPERATIONS_OF_A_HISTORY):
        before, latest = latest, {}
        for job, history in before.values():
            for label, operation in operations.items():
                after, longer = copy.deepcopy(job), f"{history}, {label}"
                with _described(longer):
                    operation(after)
                    after.check_nothing_is_lost()
                    state = _state_of(after)
                    if state not in reached:
                        reached[state] = latest[state] = (after, longer)
                        copy.deepcopy(after).check_after_the_last_fault(
                            restarts=False, by_engine=False
                        )


def _state_of(job: Job) -> str:
    """What the future of a history depends on."""
    entries = {entry: _content(job.disk, entry) for entry in sorted(job.disk.list(""))}
    names = map(sorted, (job.reported, job.milestones, job.damaged, job.flipped))
    times_s = sorted(job.times_s.items()) if job.keep.seconds else []
    return repr((entries, *names, times_s, job.generation, job.lineage, job.step))


def _content(disk: Disk, entry: str) -> list[str] | bytes:
    with contextlib.suppress(FileNotFoundError):
        return sorted(disk.list(entry))
    return bytes(disk.contents(entry))


@contextlib.contextmanager
def _described(history: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(history) from error
