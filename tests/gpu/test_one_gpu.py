"""Recovery on NCCL, as far as one GPU can show it. ``make gpu`` runs it; a test takes about a
minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_script
import pytest

from elastic.testing.small_world.world import Death, SmallWorld

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(540)]

SCRIPT = Path(gpu_script.__file__)
LIMIT_S = 500
MAX_LOST_BYTES = 32 << 20  # of the driver's and NCCL's own, over 180 rebuilds

HEAD = """
import os, signal
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
run = elastic.join(backend="gloo", checkpoints=FOLDER, when=4)
model = run.wrap(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)).to(run.device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, shuffle=True), global_batch=12)
assert run.device.type == "cuda"

def train():
    for epoch in run.epochs(EPOCHS):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            optimizer.zero_grad()
            F.mse_loss(model(inputs.to(run.device)), targets.to(run.device)).backward()
            IN_STEP
            optimizer.step()

run.retry(train)
result = {k: v.cpu() for k, v in model.state_dict().items()}
"""
DIES = """
            if run.world.rank == 1 and run.world.generation == 1 and i == 5:
                os.kill(os.getpid(), signal.SIGKILL)
"""
ASSERTS = """
            if run.world.rank == 1 and i == 5:
                torch.zeros(1, device=run.device)[torch.tensor([7], device=run.device)].item()
"""


def scenario(name: str) -> dict[str, Any]:
    """The result of a function of gpu_script.py, run in a separate process."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), name],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def script(folder: Path, in_step: str = "", epochs: int = 2) -> Path:
    path = folder / "script.py"
    text = HEAD.replace("FOLDER", repr(str(folder / "saved"))).replace("EPOCHS", str(epochs))
    path.write_text(text.replace("            IN_STEP\n", in_step.lstrip("\n")))
    return path


@pytest.mark.parametrize("name", ["world_of_one", "nccl_alone"])
def test_a_world_of_one_trains_on_nccl(name: str) -> None:
    said = scenario(name)
    assert said == {"sum": 3.0 * (1 << 20), "is_finite": True}


def test_steps_queued_at_an_abort_change_no_weight() -> None:
    said = scenario("queued_steps")
    assert said["is_aborted"] and said["weights"] == 1024.0


def test_rebuilds_leak_no_gpu_memory() -> None:
    said = scenario("rebuilds")
    assert said["lost_bytes"] < MAX_LOST_BYTES, said


def test_a_compiled_module_outlives_its_world() -> None:
    losses = scenario("compiled")["losses"]
    assert losses == pytest.approx([losses[0]] * 3)


def test_a_cuda_graph_outlives_its_world() -> None:
    first, second = scenario("graphs")["sums"]
    assert first == second


def test_a_survivor_on_a_shared_gpu_continues(world: SmallWorld, tmp_path: Path) -> None:
    """Two ranks on gloo, since NCCL needs one GPU per rank."""
    alone_at, killed_at = tmp_path / "alone", tmp_path / "killed"
    for folder in (alone_at, killed_at):
        folder.mkdir()
    alone = world.run(script(alone_at), alone_at, size=1, limit_s=300.0)
    alone.assert_success(workers=1)
    by_itself = Death(rank=1, event=1 << 40)
    outcome = world.run(script(killed_at, DIES), killed_at, size=2, death=by_itself, limit_s=300.0)
    outcome.assert_success(workers=1)
    (expected,), (survivor,) = alone.survivors, outcome.survivors
    for name, weights in expected.result.items():
        assert weights.allclose(survivor.result[name], rtol=1e-6, atol=1e-6), name


def test_a_state_on_a_gpu_is_saved_through_pinned_memory(world: SmallWorld, tmp_path: Path) -> None:
    first = world.run(script(tmp_path, epochs=1), tmp_path / "first", size=1, limit_s=300.0)
    first.assert_success(workers=1)
    second = world.run(script(tmp_path, epochs=2), tmp_path / "second", size=1, limit_s=300.0)
    second.assert_success(workers=1)
    assert "state-restored source='step-" in second.survivors[0].log


def test_small_tensors_on_a_gpu_and_on_the_cpu_are_staged_together() -> None:
    assert scenario("staged")["is_exact"]


def test_a_corrupted_cuda_context_ends_its_process(world: SmallWorld, tmp_path: Path) -> None:
    """A failed kernel corrupts the context for all later worlds: retry must not continue."""
    outcome = world.run(script(tmp_path, ASSERTS), tmp_path / "job", size=2, limit_s=300.0)
    broken = outcome.workers[1]
    assert broken.exit_code == 1, outcome.describe()
    assert "device-side assert" in broken.error or "CUDA error" in broken.error
