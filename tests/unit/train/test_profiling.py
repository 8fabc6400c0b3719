"""Traces of some steps: which steps and ranks, and what a change of the world keeps of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from kit.manual_clock import ManualClock
from kit.memory_store import MemoryServer, MemoryStore
from kit.run_kit import job, process
from test_metrics_log import world

from elastic.cli.profile import ranks_of, request_profile
from elastic.errors import ConfigError, JobFailed, TrainingError
from elastic.membership.records import Done, Keys, Outcome, Profile, encode
from elastic.telemetry.events import Event, ProfileWritten
from elastic.train.hooks import Left
from elastic.train.observers import ProfileRequest, StepProfiler


class Recorded:
    """A trace that only records its calls."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def export_chrome_trace(self, path: str) -> None:
        self.calls.append(Path(path).name)


class Rank:
    """A training rank, as its profiler sees it."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.calls: list[str] = []
        self.written: list[ProfileWritten] = []
        self.rank, self.step = rank, 0
        self.profiler = StepProfiler(
            self, folder=lambda: folder, begin=lambda: Recorded(self.calls)
        )

    def emit(self, event: Event, *, level: int = logging.INFO) -> None:
        assert isinstance(event, ProfileWritten)
        assert level == (logging.INFO if self.rank == 0 else logging.DEBUG)
        self.written.append(event)

    def enter(self, step: int) -> None:
        self.step = step
        self.profiler.enter_world(world(self.rank), step)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.profiler.commit(self.step)


def test_a_number_of_steps_is_traced_from_the_next_step(tmp_path: Path) -> None:
    rank = Rank(tmp_path, rank=3)
    rank.enter(0)
    rank.train(7)
    assert rank.profiler.request(ProfileRequest(5))
    assert not rank.profiler.request(ProfileRequest(5)), "one at a time"
    rank.train(5)
    assert rank.calls == ["start"], "the current step is incomplete: not counted"
    assert not rank.profiler.request(ProfileRequest(5))
    rank.train(2)
    assert rank.calls == ["start", "stop", "g0001-step000000008-rank3.pt.trace.json"]
    assert [(e.first, e.steps, e.asked) for e in rank.written] == [(8, 5, 5)]
    assert rank.profiler.request(ProfileRequest(1))


def test_a_range_of_steps_is_traced_on_selected_ranks(tmp_path: Path) -> None:
    for number, ranks, expected in ((0, (), 1), (1, (0, 2), 0), (2, (0, 2), 1)):
        rank = Rank(tmp_path, rank=number)
        rank.profiler.request(ProfileRequest(4, first=10, ranks=ranks))
        rank.enter(0)
        rank.train(30)
        assert [(e.first, e.steps) for e in rank.written] == [(10, 4)] * expected
    late = Rank(tmp_path)
    late.profiler.request(ProfileRequest(4, first=10))
    late.enter(20)  # it resumes at step 20
    late.train(10)
    assert late.calls == []


@pytest.mark.parametrize("ended", ["fault", "change", "close"])
def test_the_end_of_a_world_ends_the_trace(tmp_path: Path, ended: Left) -> None:
    rank = Rank(tmp_path)
    rank.enter(0)
    rank.profiler.request(ProfileRequest(10))
    rank.train(4)
    rank.profiler.leave_world(ended)
    # After a fault a device may hang in collectives of lost peers until the next world.
    assert rank.calls == (["start"] if ended == "fault" else [*rank.calls])
    rank.enter(4)
    assert [(e.first, e.steps, e.asked) for e in rank.written] == [(1, 3, 10)]
    assert rank.calls.count("stop") == 1
    rank.train(20)
    rank.profiler.close()
    assert len(rank.written) == 1


def test_a_failing_profiler_does_not_affect_training(tmp_path: Path) -> None:
    rank = Rank(tmp_path)

    def broken() -> Recorded:
        raise RuntimeError("Can't start profiler: another one is active")

    rank.profiler = StepProfiler(rank, folder=lambda: tmp_path, begin=broken)
    rank.enter(0)
    rank.profiler.request(ProfileRequest(2))
    rank.train(5)
    assert rank.profiler.request(ProfileRequest(2))


def test_a_script_profiles_with_torchs_profiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_JOURNAL", str(tmp_path))
    with process() as run:
        run.profile(steps=2)
        with pytest.raises(TrainingError, match="another profile is running"):
            run.profile(steps=2)
        script = job(run)
        script.train(1)
    (file,) = (tmp_path / "profiles").iterdir()
    assert file.name == "g0001-step000000000-rank0.pt.trace.json"
    names = [event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]]
    assert sum(name.startswith("Optimizer.step#Adam") for name in names) == 2


@pytest.mark.parametrize("steps", [0, -1, True, range(0), range(0, 10, 2), 10_001])
def test_invalid_step_counts_are_rejected(steps: int) -> None:
    with process() as run, pytest.raises(ConfigError, match="must be 1 to 10000 consecutive steps"):
        run.profile(steps)


# Requests --------------------------------------------------------------------------------------


KEYS = Keys.of("/elastic", "llama")


def test_a_request_without_a_job_is_rejected() -> None:
    store = MemoryStore(MemoryServer())
    with pytest.raises(ConfigError, match="job llama is not training"):
        request_profile(store, KEYS, Profile(steps=1, ranks=()), clock=ManualClock())
    done = Done(
        outcome=Outcome.SUCCESS,
        reason="a finished",
        exit_code=0,
        generation=1,
        final_step=9,
        time_s=1.0,
    )
    store.put(KEYS.done, encode(done))
    with pytest.raises(JobFailed, match="has ended: a finished"):
        request_profile(store, KEYS, Profile(steps=1, ranks=()), clock=ManualClock())


def test_ranks_are_parsed_from_lists_and_ranges() -> None:
    assert ranks_of("") == ()
    assert ranks_of("3,0,4-6") == (0, 3, 4, 5, 6)
    for text in ("a", "1-", "-1", "1;2", "0-999999"):
        with pytest.raises(ConfigError, match="--ranks="):
            ranks_of(text)
