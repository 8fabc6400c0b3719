"""Loops with Accelerate and with Fabric: equal to the plain framework on the largest world."""

from __future__ import annotations

import functools
import importlib.util
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.plain_store import plain_store

from elastic.testing.small_world.world import Death, RunOutcome, SmallWorld

SCRIPTS = Path(__file__).parent / "scripts"
Plain = Callable[[tuple[str, ...]], dict[str, torch.Tensor]]
SIZE = 3
EQUAL = 1e-12
DEVICE = "kit.shared_gpu:share_if_told"
IMPORTS = ("accelerate", "lightning.fabric")


@pytest.fixture(scope="module")
def world() -> Iterator[SmallWorld]:
    installed = [name for name in IMPORTS if importlib.util.find_spec(name.partition(".")[0])]
    with SmallWorld(prepare=DEVICE, imports=installed) as made:
        yield made


@pytest.fixture(scope="module")
def plain(world: SmallWorld, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """The result of the plain framework with three undisturbed ranks."""

    @functools.cache
    def trained(case: tuple[str, ...]) -> dict[str, torch.Tensor]:
        script, *options = case
        folder = tmp_path_factory.mktemp("plain")
        arguments = ["plain", *options]
        with plain_store() as where:
            outcome = world.run(
                SCRIPTS / script, folder, size=1, arguments=arguments, environment=where
            )
        outcome.assert_success(workers=1)
        return outcome.survivors[0].result

    return trained


def elastic_run(
    world: SmallWorld, folder: Path, script: str, *options: str, **how: Any
) -> RunOutcome:
    arguments = ["elastic", *options]
    return world.run(SCRIPTS / script, folder, size=SIZE, arguments=arguments, limit_s=240.0, **how)


def assert_equal(
    outcome: RunOutcome, expected: Mapping[str, torch.Tensor], *, workers: int
) -> None:
    outcome.assert_success(workers=workers)
    for survivor in outcome.survivors:
        assert survivor.result.keys() == expected.keys()
        for name, value in expected.items():
            difference = (survivor.result[name].double() - value).abs().max().item()
            assert difference < EQUAL, (survivor.name, name, difference, outcome.died_at)


# Of Accelerate: accumulated batches, data workers, split_batches. Of Fabric: the first two.
ACCELERATE, FABRIC = "accelerate_loop.py", "fabric_loop.py"
QUICK = [(ACCELERATE, "3", "0", "0"), (FABRIC, "2", "0")]
SLOW = [
    (ACCELERATE, "1", "0", "0"),
    (ACCELERATE, "1", "2", "0"),
    (ACCELERATE, "2", "0", "1"),
    (FABRIC, "1", "2"),
]
CASES = [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_death_leaves_what_the_plain_framework_computes(
    world: SmallWorld, plain: Plain, tmp_path: Path, case: tuple[str, ...]
) -> None:
    pytest.importorskip(case[0].partition("_")[0].replace("fabric", "lightning"))
    undisturbed = elastic_run(world, tmp_path / "undisturbed", *case)
    assert_equal(undisturbed, plain(case), workers=SIZE)
    for seed in range(2 if case in QUICK else 12):
        pick = random.Random(str((seed, case)))
        rank = pick.randrange(SIZE)
        death = Death(rank=rank, event=pick.randrange(1, undisturbed.workers[rank].lines))
        is_replaced = bool(seed % 2)
        outcome = elastic_run(
            world, tmp_path / str(seed), *case, death=death, is_replaced=is_replaced
        )
        assert outcome.died_at
        assert_equal(outcome, plain(case), workers=SIZE - 1 + is_replaced)


TOKENS = [
    (ACCELERATE, "2", "0", "0", "counts"),
    (ACCELERATE, "3", "0", "0", "tokens"),
    (FABRIC, "2", "0", "tokens"),
    pytest.param((ACCELERATE, "1", "0", "0", "tokens", "first"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("case", TOKENS, ids="-".join)
def test_a_count_of_batches_and_a_mean_over_tokens_survive_a_death(
    world: SmallWorld, plain: Plain, tmp_path: Path, case: tuple[str, ...]
) -> None:
    """Each rank of the smaller world has batches of the largest one."""
    pytest.importorskip(case[0].partition("_")[0].replace("fabric", "lightning"))
    outcome = elastic_run(world, tmp_path, *case, death=Death(rank=1, event=50))
    assert outcome.died_at
    assert_equal(outcome, plain(case), workers=SIZE - 1)


LIMITED = """
import itertools
import torch
from torch.utils.data import DataLoader
from elastic.integrations.accelerate import ElasticAccelerator

accelerator = ElasticAccelerator()
module = torch.nn.Linear(1, 1)
model, optimizer, loader = accelerator.prepare(
    module,
    torch.optim.SGD(module.parameters(), lr=0.1),
    DataLoader(torch.ones(36, 1), batch_size=3),
)

def train():
    for _ in accelerator.epochs(2):
        model.train()
        for x in itertools.islice(loader, 3):
            accelerator.backward(model(x).mean())  # a step
            optimizer.step()
            optimizer.zero_grad()

accelerator.retry(train)
result = {}
"""


def test_a_limit_of_batches_counts_those_before_a_death(world: SmallWorld, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = tmp_path / "script.py"
    script.write_text(LIMITED)
    line = LIMITED[: LIMITED.index("# a step")].count("\n") + 1
    death = Death(rank=1, event=2, line=line)
    outcome = world.run(script, tmp_path / "run", size=SIZE, death=death, is_counted=False)
    outcome.assert_success(workers=SIZE - 1)
    assert [survivor.steps for survivor in outcome.survivors] == [6, 6]


SPLIT = """
import torch
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
from elastic.integrations.accelerate import ElasticAccelerator

config = DataLoaderConfiguration(split_batches=True)
accelerator = ElasticAccelerator(dataloader_config=config)
module = torch.nn.Linear(1, 1)
model, optimizer, loader, held_out = accelerator.prepare(
    module,
    torch.optim.SGD(module.parameters(), lr=0.1),
    DataLoader(torch.ones(12, 1), batch_size=3),
    DataLoader(torch.arange(7.0).view(7, 1), batch_size=3),
)
seen = []

def evaluate():
    model.eval()
    with torch.no_grad():
        return torch.cat([accelerator.gather_for_metrics(x) for x in held_out]).flatten().tolist()

def train():
    for _ in accelerator.epochs(1):
        model.train()
        for x in loader:
            accelerator.backward(model(x).mean())  # a step
            optimizer.step()
            optimizer.zero_grad()
        seen[:] = accelerator.run.once("evaluate", evaluate)

accelerator.retry(train)
result = {"seen": torch.tensor(sorted(seen))}
"""


def test_split_batches_are_evaluated_by_ranks_that_do_not_divide_them(
    world: SmallWorld, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    script = tmp_path / "script.py"
    script.write_text(SPLIT)
    line = SPLIT[: SPLIT.index("# a step")].count("\n") + 1
    death = Death(rank=1, event=2, line=line)
    outcome = world.run(script, tmp_path / "run", size=SIZE, death=death, is_counted=False)
    outcome.assert_success(workers=SIZE - 1)
    for survivor in outcome.survivors:
        assert survivor.result["seen"].tolist() == [float(i) for i in range(7)]


LOADS = """
from contextlib import suppress
from elastic.integrations.accelerate import ElasticAccelerator

accelerator = ElasticAccelerator()
with suppress(ValueError):
    accelerator.load_state("nowhere")
"""


def test_load_state_warns_that_it_is_not_where_a_job_continues(
    world: SmallWorld, tmp_path: Path
) -> None:
    pytest.importorskip("accelerate")
    script = tmp_path / "script.py"
    script.write_text(LOADS)
    outcome = world.run(script, tmp_path / "run", size=1)
    outcome.assert_success(workers=1)
    assert "load_state(nowhere) sets what the job begins with, at step 0" in outcome.workers[0].log


REFUSED = """
import sys
import accelerate
import torch
from accelerate.local_sgd import LocalSGD
from elastic.integrations.accelerate import ElasticAccelerator

what = sys.argv[1]
hook = accelerate.utils.DDPCommunicationHookType.FP16
kwargs = accelerate.DistributedDataParallelKwargs(comm_hook=hook) if what == "hook" else None
accelerator = ElasticAccelerator(kwargs_handlers=[kwargs] if kwargs else [])
model = accelerator.prepare(torch.nn.Linear(1, 1))
if what == "again":
    accelerator.free_memory()
    accelerator.prepare(torch.nn.Linear(1, 1))
elif what == "local SGD":
    with LocalSGD(accelerator, model, local_sgd_steps=2):
        pass
"""
REFUSALS = {
    "hook": "DistributedDataParallelKwargs sets fp16",
    "again": "prepare() was called again after free_memory()",
    "local SGD": "LocalSGD lets the weights of ranks differ",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_accelerate_cannot_recover_is_refused(
    world: SmallWorld, tmp_path: Path, what: str
) -> None:
    pytest.importorskip("accelerate")
    script = tmp_path / "script.py"
    script.write_text(REFUSED)
    outcome = world.run(script, tmp_path / "run", size=2, arguments=[what], is_counted=False)
    errors = [worker.error for worker in outcome.workers if worker.error]
    assert errors and all(f"ConfigError: {REFUSALS[what]}" in error for error in errors)
