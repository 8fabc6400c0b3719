"""The engine that replaces a dead writer thread, and saves without one after too many deaths."""

from __future__ import annotations

import threading

import pytest
import torch

from checkpoints import LatestN, SaveOutcome, SaveStatus, WriterGroup, list_checkpoints
from checkpoints.engine import MAX_DEATHS, SupervisedEngine
from checkpoints.testing import FaultyStorage, MemoryStorage, SimulatedCrash

LONG_S = 60.0
WORLD = WriterGroup(nonce="aa")
STATE = {"weight": torch.ones(3)}


class Supervised:
    """An engine, its reports, and a switch that makes its writer threads die."""

    def __init__(self) -> None:
        self.deadly = threading.Event()
        self.outcomes: list[SaveOutcome] = []
        self.deaths: list[str] = []
        self.storage = FaultyStorage(MemoryStorage(), before=self._before)
        self.engine = SupervisedEngine(
            self.storage, LatestN(100), report=self.outcomes.append, on_death=self.deaths.append
        )

    def _before(self, label: str) -> None:
        if self.deadly.is_set() and threading.current_thread().name == "checkpoint-writer":
            raise SimulatedCrash(label)

    def save(self, step: int) -> None:
        self.engine.save(STATE, step=step, world=WORLD, data_position=None, wait_s=LONG_S)
        assert self.engine.wait(LONG_S)

    @property
    def committed(self) -> list[int]:
        return [o.step for o in self.outcomes if o.status is SaveStatus.COMMITTED]


def test_a_save_whose_thread_died_is_reported_and_the_next_one_commits() -> None:
    supervised = Supervised()
    supervised.deadly.set()
    supervised.save(1)
    supervised.deadly.clear()
    supervised.save(2)
    supervised.engine.close(LONG_S)
    assert supervised.committed == [2]
    (death,) = supervised.deaths
    assert "writer thread died of SimulatedCrash" in death
    assert death.endswith("a new one takes over")
    (lost,) = [o for o in supervised.outcomes if o.status is not SaveStatus.COMMITTED]
    assert lost.step == 1 and "died" in lost.reason


def test_after_too_many_deaths_saves_run_on_the_callers_thread() -> None:
    supervised = Supervised()
    supervised.deadly.set()
    for step in range(MAX_DEATHS):
        supervised.save(step)
    assert len(supervised.deaths) == MAX_DEATHS
    assert supervised.deaths[-1].endswith("saves now block training")
    supervised.save(10)
    supervised.engine.close(LONG_S)
    assert supervised.committed == [10]
    assert [info.step for info in list_checkpoints(supervised.storage)] == [10]


@pytest.mark.parametrize("deaths", [0, MAX_DEATHS])
def test_a_task_runs_with_and_without_a_writer_thread(deaths: int) -> None:
    supervised = Supervised()
    supervised.deadly.set()
    for step in range(deaths):
        supervised.save(step)
    supervised.deadly.clear()
    done = threading.Event()
    threads: list[str] = []

    def task() -> None:
        threads.append(threading.current_thread().name)
        done.set()

    supervised.engine.submit(task)
    assert done.wait(LONG_S)
    assert (threads == ["checkpoint-writer"]) == (deaths == 0)
    supervised.engine.close(LONG_S)
