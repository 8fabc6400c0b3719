"""Checkpoints of states that occur in real training."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checkpoint_states import same, save_all, small_state
from torch import nn

import checkpoints
from checkpoints.testing.faults import FaultyStorage, StorageFault
from checkpoints.testing.memory_storage import MemoryStorage

ALONE = checkpoints.WriterGroup(nonce="aa")


class Net(nn.Module):
    """Tied weights, integer and bool buffers, an empty one, half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.norm = nn.BatchNorm1d(4)
        self.body = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0, 5))
        self.register_buffer("scale", torch.tensor(0.5).to(torch.float8_e4m3fn))
        self.register_buffer("view", torch.arange(6.0).reshape(2, 3).t())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embedding(tokens))
        return self.head(self.body(hidden.bfloat16()).float())  # type: ignore[no-any-return]


def train_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.arange(11)
    nn.functional.cross_entropy(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


def build_model(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_restored_model_trains_as_if_uninterrupted(tmp_path: Path, world_size: int) -> None:
    model, optimizer = build_model(0)
    train_once(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    name = save_all(tmp_path, state, step=1, world_size=world_size)
    other, other_optimizer = build_model(1)
    loaded = checkpoints.load(tmp_path, name, into={"model": other.state_dict()}, strict=False)
    other_optimizer.load_state_dict(loaded.state["optimizer"])
    for _ in range(2):
        train_once(model, optimizer)
        train_once(other, other_optimizer)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert other.head.weight is other.embedding.weight


def test_an_optimizer_may_create_its_state_after_the_first_save(tmp_path: Path) -> None:
    """It has no state before its first step. A load names the tensors that are missing."""
    model, optimizer = build_model(0)

    def state() -> dict[str, Any]:
        return {"optimizer": optimizer.state_dict()}

    with checkpoints.Engine(tmp_path, keep=None) as engine:
        engine.reserve(state())
        before = engine.save_async(state(), step=0, world=ALONE).wait(60)
        train_once(model, optimizer)
        after = engine.save_async(state(), step=1, world=ALONE).wait(60)
    assert before is not None and after is not None
    assert checkpoints.load(tmp_path, before.name).state["optimizer"]["state"] == {}
    assert same(checkpoints.load(tmp_path, after.name).state, state())
    with pytest.raises(checkpoints.StateMismatch, match="optimizer/state/0/exp_avg"):
        checkpoints.load(tmp_path, after.name, into={"optimizer": build_model(1)[1].state_dict()})


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_clock_that_jumps_changes_only_timestamps(tmp_path: Path, seed: int) -> None:
    jumps = itertools.cycle([1e9, 2e9, 5.0, -1e9, 0.0, 4e9])
    for _ in range(seed):
        next(jumps)
    keep = checkpoints.LatestN(2) | checkpoints.EveryNSeconds(3600)
    with checkpoints.Engine(tmp_path, keep=keep, clock=lambda: next(jumps)) as engine:
        for step in range(8):
            outcome = engine.save_async(small_state(step), step=step, world=ALONE).wait(60)
            assert outcome is not None and outcome.status is checkpoints.SaveStatus.COMMITTED
            newest = checkpoints.latest(tmp_path)
            assert newest.checkpoint is not None and newest.checkpoint.step == step
    for info in checkpoints.list_checkpoints(tmp_path):
        assert same(checkpoints.load(tmp_path, info.name).state, small_state(info.step))
    # Garbage collection with a wrong clock removes leftovers at most, nothing committed.
    for now in (0.0, 1e12):
        checkpoints.collect_garbage(tmp_path, clock=lambda now=now: now)  # type: ignore[misc]
    assert checkpoints.list_checkpoints(tmp_path)[0].step == 7


@pytest.mark.parametrize("fault", list(StorageFault))
def test_a_fault_at_any_storage_call_leaves_complete_checkpoints(fault: StorageFault) -> None:
    """Listed checkpoints are complete after each fault, and a successor continues."""

    def run(at: int | None) -> tuple[MemoryStorage, int]:
        storage = MemoryStorage()
        checkpoints.save(storage, small_state(1), step=1, nonce="aa")
        faulty = FaultyStorage(storage, at=at, fault=fault)
        engine = checkpoints.Engine(faulty, keep=checkpoints.LatestN(2))
        try:
            for step in (2, 3):
                handle = engine.save_async(small_state(step), step=step, world=ALONE)
                handle.wait(60)
            engine.close()
        except RuntimeError as error:
            assert "thread died" in str(error)
        return storage, len(faulty.calls)

    _, count = run(None)
    assert count > 40
    for at in range(count):
        storage, _ = run(at)
        listed = checkpoints.list_checkpoints(storage)
        assert listed
        for info in listed:
            assert same(checkpoints.load(storage, info.name).state, small_state(info.step))
        checkpoints.collect_garbage(storage, generation=1, nonce="bb")
        assert [entry for entry in storage.list("") if entry.startswith(".tmp-step")] == []
        save_all(storage, small_state(4), step=4, generation=1, nonce="bb")


GIB = 1 << 30


@pytest.mark.soak
def test_a_tensor_of_six_gib_is_restored(tmp_path: Path) -> None:
    """Offsets beyond 32 bits, in a tensor and in its file."""
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free_kib = int(memory["MemAvailable"].split()[0])
    if free_kib < 14 << 20 or shutil.disk_usage(tmp_path).free < 8 * GIB:
        pytest.skip("needs 14 GiB of memory and 8 GiB of disk")
    # Untouched pages of zeros take no memory until they are read.
    large = torch.from_numpy(numpy.zeros(6 * GIB, numpy.uint8))
    places = [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 5 * GIB + 12345, 6 * GIB - 1]
    for value, place in enumerate(places, start=1):
        large[place] = value
    name = save_all(tmp_path, {"large": large, "small": torch.ones(3)}, step=1, world_size=2)
    live = {"large": torch.from_numpy(numpy.zeros(6 * GIB, numpy.uint8)), "small": torch.zeros(3)}
    checkpoints.load(tmp_path, name, into=live)
    for value, place in enumerate(places, start=1):
        assert int(live["large"][place]) == value
    assert torch.equal(live["large"], large)
