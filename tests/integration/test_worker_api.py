"""The worker's API in real processes: stock torchrun on loopback, and plain python."""

from __future__ import annotations

import json
import os
import random
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import worker_api_script as script

import checkpoints
from elastic.testing.forks.server import shared_fork_server
from elastic.testing.ledger import RunLedger, read_ledger
from elastic.testing.node import LocalNode

SCRIPT = Path(script.__file__)
DEADLINE_S = 240


@dataclass
class Outcome:
    """The result of a launch."""

    code: int
    stderr: str
    folder: Path

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "out.json").read_text())
        return found

    @property
    def weights(self) -> torch.Tensor:
        return torch.tensor(self.result["weights"], dtype=torch.float64)

    @property
    def ledger(self) -> RunLedger:
        return read_ledger(self.folder / "ledger")


def launch(folder: Path, size: int, *args: object, restarts: int = 0) -> Outcome:
    """Run the script to completion: plain python for a world of one, otherwise torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    torchrun += [f"--max-restarts={restarts}", "--monitor-interval=0.05"]
    command = [sys.executable, *(torchrun if size > 1 else []), str(SCRIPT)]
    node = LocalNode(
        "alone",
        [*command, "--out", str(folder / "out.json"), *map(str, args)],
        {**os.environ, "ELASTIC_LEDGER": str(folder / "ledger"), "OMP_NUM_THREADS": "1"},
        uuid.uuid4().hex,
        folder / f"{uuid.uuid4().hex}.log",
        fork_server=shared_fork_server(),
    )
    try:
        return Outcome(node.wait(DEADLINE_S), node.log_text(), folder)
    finally:
        node.kill()


def by_hand(ledger: RunLedger) -> torch.Tensor:
    """Reference in plain torch on the samples of each step: the mean over the global batch."""
    torch.manual_seed(0)
    model = script.network()
    optimizer = script.optimizer_for(model, "sgd")
    x, y = script.dataset().tensors
    for number in range(ledger.last_step + 1):
        samples = [i for s in ledger.surviving if s.step == number for i in s.samples]
        optimizer.zero_grad()
        F.mse_loss(model(x[samples]), y[samples]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return torch.tensor(script.weights_of(model), dtype=torch.float64)


@pytest.mark.parametrize(
    ("size", "micro_batch"),
    [(3, 2), *(pytest.param(*row, marks=pytest.mark.slow) for row in ((1, 2), (3, None)))],
)
def test_uneven_shares_train_like_a_single_process(
    tmp_path: Path, size: int, micro_batch: int | None
) -> None:
    """52 samples in steps of 10: the last step has 2, so the third of three ranks has none."""
    micro = ["--micro-batch", micro_batch] if micro_batch else []
    outcome = launch(tmp_path, size, "--epochs", 2, "--optimizer", "sgd", *micro)
    assert outcome.code == 0, outcome.stderr
    outcome.ledger.assert_exactly_once(script.SAMPLES, 2)
    outcome.ledger.final_hash()  # the same on every rank
    assert torch.allclose(outcome.weights, by_hand(outcome.ledger), rtol=0, atol=1e-9)
    assert outcome.result["ranks"] == size
    x, y = script.dataset().tensors
    model = script.network()
    torch.nn.utils.vector_to_parameters(outcome.weights, model.parameters())
    assert outcome.result["mse"] == pytest.approx(F.mse_loss(model(x), y).item())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    outcome = launch(tmp_path_factory.mktemp("undisturbed"), 1)
    assert outcome.code == 0, outcome.stderr
    return outcome.weights


@pytest.mark.parametrize(("before", "after"), [(2, 3), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_a_killed_job_resumes_at_another_world_size_without_loss(
    tmp_path: Path, undisturbed: torch.Tensor, before: int, after: int
) -> None:
    draw = random.Random(f"{before} {after}")
    rank, step = draw.randrange(before), draw.randrange(1, 11)
    (tmp_path / "die").write_text(f"{rank} {step}")
    args = ("--checkpoints", tmp_path / "saved", "--die", tmp_path / "die")
    assert launch(tmp_path, before, *args).code != 0
    outcome = launch(tmp_path, after, *args)
    where = f"killed rank {rank} of {before} in step {step}: {outcome.stderr}"
    assert outcome.code == 0, where
    assert torch.allclose(outcome.weights, undisturbed, rtol=0, atol=1e-9), where
    outcome.ledger.assert_exactly_once(script.SAMPLES, 2)


@pytest.mark.slow
def test_workers_restarted_by_torchrun_resume(tmp_path: Path, undisturbed: torch.Tensor) -> None:
    (tmp_path / "die").write_text("1 7 saved")
    args = ("--checkpoints", tmp_path / "saved", "--die", tmp_path / "die")
    outcome = launch(tmp_path, 2, *args, restarts=1)
    assert outcome.code == 0, outcome.stderr
    assert torch.allclose(outcome.weights, undisturbed, rtol=0, atol=1e-9)
    # At the kill, at least the checkpoint of step 3 was complete, and perhaps that of step 6. The
    # other rank saves its current state, in step 7 or after it, unless torchrun ends it first.
    (resumed,) = {s.step for s in outcome.ledger.starts if s.generation == 2}
    assert resumed in (3, 6, 7, 8)
    outcome.ledger.assert_exactly_once(script.SAMPLES, 2)
    assert checkpoints.list_checkpoints(tmp_path / "saved")[0].step == 12


def test_an_error_of_the_script_reaches_the_agent_with_its_message(tmp_path: Path) -> None:
    outcome = launch(tmp_path, 2, "--raise-on-rank", 1)
    assert outcome.code == 1
    assert "ValueError: a mistake of the user" in outcome.stderr.split("ChildFailedError")[-1]


@pytest.mark.slow
def test_a_global_batch_smaller_than_the_world_is_rejected(tmp_path: Path) -> None:
    outcome = launch(tmp_path, 2, "--global-batch", 1)
    assert outcome.code != 0
    assert "a global batch of 1 is smaller than the world of 2 ranks" in outcome.stderr


def test_a_restore_error_of_one_rank_ends_all_ranks(tmp_path: Path) -> None:
    """Rank 0 finds no loadable checkpoint; the others must not wait for it."""
    saved = tmp_path / "saved"
    assert launch(tmp_path, 1, "--checkpoints", saved, "--epochs", 1).code == 0
    for info in checkpoints.list_checkpoints(saved):
        for file in (saved / info.name).glob("*.safetensors"):
            file.write_bytes(b"\0" * file.stat().st_size)
    outcome = launch(tmp_path, 2, "--checkpoints", saved)
    assert outcome.code != 0
    assert "CheckpointRequired: none of the" in outcome.stderr
    # torchrun terminates the other rank as soon as it sees the first one exit, so the other may
    # not get to print its own error.
    of_another = "TrainingError: this rank ends because rank 0 could not restore the state ("
    terminated = "closing signal SIGTERM" in outcome.stderr
    assert terminated or f"{of_another}CheckpointRequired: none of the" in outcome.stderr
