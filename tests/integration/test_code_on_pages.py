"""The code on the pages that a reader copies from first runs as it is printed.

Each block is a script of its own, after the lines that the page takes for granted: imports, a data
set, a model. Blocks that need GPUs, several nodes or a framework are run by the tests of their
examples instead.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEADLINE_S = 300.0  # of a process that imports torch, on a busy machine

IMPORTS = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import elastic

torch.manual_seed(0)
seed = 0
features = torch.randn(512, 4)
dataset = val = TensorDataset(features, (features.sum(1) > 0).long())
a, b = dataset, dataset
Net = lambda: nn.Linear(4, 2)

def tqdm(iterable, **_):
    return iterable
"""
JOINED = """
run = elastic.join(checkpoints="job")
model = run.wrap(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(optimizer=optimizer)
run.state.setdefault("best", 0.0)
loss_of = lambda x, y: F.cross_entropy(model(x), y)
get_batch = lambda split: dataset[torch.randint(512, (8,))]

def train_one_epoch():
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
"""
LOADER = "loader = run.loader(DataLoader(dataset, batch_size=8))\n"
TOKENS = """
data = DataLoader(TensorDataset(torch.randn(64, 5, 4), torch.randint(2, (64, 5))), batch_size=8)
"""


def blocks_of(page: str) -> list[str]:
    """The Python of a page; of a difference, what the script is like afterwards."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    blocks = []
    for language, block in BLOCK.findall(text):
        lines = block.splitlines()
        if language == "diff":
            lines = [line[1:] for line in lines if not line.startswith("-")]
        blocks.append("\n".join(lines))
    return blocks


def assert_runs(script: str, folder: Path) -> None:
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ELASTIC_TENSORBOARD": "off"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stderr[-2000:]}"


def test_the_difference_in_the_readme_trains(tmp_path: Path) -> None:
    (script,) = (block for block in blocks_of("README.md") if "elastic.join" in block)
    assert "run.retry(train)" in script
    assert_runs(IMPORTS + script.replace("/shared/job-1", "job"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(blocks_of("docs/data.md"))))
def test_the_blocks_about_data_run(tmp_path: Path, number: int) -> None:
    block = blocks_of("docs/data.md")[number]
    needed = JOINED
    if "run.loader(data," in block:
        needed += TOKENS
    elif "loader = run.loader" not in block:
        needed += LOADER
    # An ellipsis stands for the lines of a step.
    step = "optimizer.zero_grad(); F.cross_entropy(model(x), y).backward(); optimizer.step()"
    assert_runs(IMPORTS + needed + block.replace("...\n", f"{step}\n"), tmp_path)


@pytest.mark.slow
def test_the_loop_without_a_loader_trains(tmp_path: Path) -> None:
    (block,) = (block for block in blocks_of("docs/how-to/adopt.md") if "run.begin()" in block)
    assert_runs(IMPORTS + JOINED + block.replace("10_000", "3"), tmp_path)
