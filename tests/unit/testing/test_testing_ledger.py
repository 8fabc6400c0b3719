"""The analyser that the kill tests rely on: it must detect every way to lose a sample."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic.testing.ledger import (
    Coverage,
    LedgerEnd,
    LedgerError,
    LedgerReader,
    LedgerStep,
    RunLedger,
    Start,
    read_ledger,
)


def start(generation: int, step: int, rank: int = 0, size: int = 1, node: str = "a") -> Start:
    return Start(generation, step, rank, size, node, time_s=0.0)


def step(
    generation: int,
    number: int,
    samples: tuple[int, ...] = (),
    *,
    epoch: int = 0,
    rank: int = 0,
    node: str = "a",
    at: float = 0.0,
) -> LedgerStep:
    return LedgerStep(generation, number, epoch, rank, node, samples, time_s=at)


def test_a_later_start_discards_later_steps_of_older_generations() -> None:
    ledger = RunLedger(
        starts=(start(1, 0), start(2, 2)),
        steps=(step(1, 0), step(1, 1), step(1, 2), step(1, 3), step(2, 2), step(2, 3)),
    )
    assert [(s.generation, s.step) for s in ledger.surviving] == [(1, 0), (1, 1), (2, 2), (2, 3)]
    assert ledger.recomputed_steps == 2


def test_a_generation_that_rolls_back_further_discards_all_before() -> None:
    ledger = RunLedger(
        starts=(start(1, 0), start(2, 5), start(3, 3)),
        steps=(step(1, 2), step(1, 4), step(2, 5), step(3, 3)),
    )
    assert [(s.generation, s.step) for s in ledger.surviving] == [(1, 2), (3, 3)]


def test_a_generation_without_steps_still_discards_earlier_ones() -> None:
    ledger = RunLedger(
        starts=(start(1, 0), start(2, 1), start(3, 4)), steps=(step(1, 0), step(1, 3))
    )
    assert [s.step for s in ledger.surviving] == [0]


def test_exactly_once_over_ranks_and_epochs() -> None:
    ledger = RunLedger(
        starts=(start(1, 0, 0, 2), start(1, 0, 1, 2)),
        steps=(
            step(1, 0, (0, 2), rank=0),
            step(1, 0, (1, 3), rank=1),
            step(1, 1, (3, 2), epoch=1, rank=0),
            step(1, 1, (1, 0), epoch=1, rank=1),
        ),
    )
    ledger.assert_exactly_once(n=4, epochs=2)


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ((0, 1), "1 (2) never"),
        ((0, 1, 2, 1), "1 (1) more than once"),
        ((0, 1, 2, 7), "1 (7) not in the dataset"),
    ],
)
def test_a_lost_repeated_or_unknown_sample_is_detected(samples: tuple[int, ...], says: str) -> None:
    ledger = RunLedger(starts=(start(1, 0),), steps=(step(1, 0, samples),))
    with pytest.raises(LedgerError, match="epoch 0") as error:
        ledger.assert_exactly_once(n=3, epochs=1)
    assert says in str(error.value)


def test_a_missing_or_excess_epoch_is_detected() -> None:
    ledger = RunLedger(starts=(start(1, 0),), steps=(step(1, 0, (0,)), step(1, 1, (0,), epoch=2)))
    with pytest.raises(LedgerError, match="epoch 1"):
        ledger.assert_exactly_once(n=1, epochs=3)
    with pytest.raises(LedgerError, match=r"epochs \[2\]"):
        ledger.assert_exactly_once(n=1, epochs=1)


def test_samples_of_discarded_steps_do_not_count() -> None:
    ledger = RunLedger(
        starts=(start(1, 0), start(2, 0)), steps=(step(1, 0, (0, 1)), step(2, 0, (1, 0)))
    )
    assert ledger.coverage(2, epoch=0) == Coverage(2, (), (), ())


def test_concurrent_worlds_are_detected() -> None:
    apart = (step(1, 0, at=1.0), step(1, 1, at=2.0), step(2, 2, at=3.0))
    RunLedger(starts=(start(1, 0), start(2, 2)), steps=apart).assert_one_world_at_a_time()
    late_writer = (*apart, step(1, 1, rank=1, at=9.0))
    RunLedger(starts=(start(1, 0), start(2, 2)), steps=late_writer).assert_one_world_at_a_time()
    with pytest.raises(LedgerError, match="generation 1 still completed"):
        RunLedger(steps=(*apart, step(1, 2, at=3.5))).assert_one_world_at_a_time()


def test_the_final_hash_requires_all_ranks_to_agree() -> None:
    starts = (start(2, 0, 0, 2), start(2, 0, 1, 2))
    same = (LedgerEnd(2, 0, "f00", 0.0), LedgerEnd(2, 1, "f00", 0.0))
    assert RunLedger(starts=starts, ends=same).final_hash() == "f00"
    with pytest.raises(LedgerError, match=r"finished: \[0\]"):
        RunLedger(starts=starts, ends=same[:1]).final_hash()
    with pytest.raises(LedgerError, match="differ"):
        RunLedger(starts=starts, ends=(same[0], LedgerEnd(2, 1, "bad", 0.0))).final_hash()
    with pytest.raises(LedgerError, match="no rank"):
        RunLedger(starts=starts).final_hash()


def test_a_growing_file_is_read_without_its_incomplete_last_line(tmp_path: Path) -> None:
    assert LedgerReader(tmp_path / "absent").read() == RunLedger()
    file = tmp_path / "worker.jsonl"
    first = {"event": "start", "generation": 1, "step": 0, "rank": 1, "size": 2, "node": "b"}
    done = {"event": "step", "generation": 1, "step": 0, "epoch": 0, "rank": 1, "samples": [4]}
    file.write_text(json.dumps({**first, "time": 1.5}) + "\n" + json.dumps(done)[:20])
    reader = LedgerReader(tmp_path)
    assert reader.read() == RunLedger(starts=(Start(1, 0, 1, 2, "b", 1.5),))
    file.write_text(
        json.dumps({**first, "time": 1.5}) + "\n" + json.dumps({**done, "time": 2.5}) + "\n"
    )
    grown = reader.read()
    assert grown.steps == (LedgerStep(1, 0, 0, 1, "b", (4,), 2.5),)
    assert grown == read_ledger(tmp_path)


def test_an_invalid_line_is_reported_with_its_location(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"event": "lunch"}\n')
    with pytest.raises(LedgerError, match=r"x\.jsonl:1.*lunch"):
        read_ledger(tmp_path)
