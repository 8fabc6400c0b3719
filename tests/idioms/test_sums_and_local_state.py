"""Sums and local state after a step that only some ranks have committed, and after joins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from idiom_runs import IdiomRuns
from test_worst_places import BY_ITSELF, HEAD

# After the update of step 5, ranks 1 and 2 meet, and rank 2 dies: rank 0 commits the step, rank 1
# does not.
TORN = """
class Meter:
    def __init__(self):
        self.steps = []
    def state_dict(self):
        return {"steps": self.steps}
    def load_state_dict(self, state):
        self.steps = state["steps"]

model = run.wrap(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
meter = Meter()
run.track(optimizer=optimizer)
run.track(meter=meter, local=True)
loader = run.loader(DataLoader(dataset, shuffle=True), global_batch=12)

def train():
    run.state.setdefault("loss", 0.0)
    run.state.setdefault("samples", 0.0)
    pair = dist.new_group([1, 2]) if run.world.size == 3 else None
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            n, number = len(inputs), 8 * epoch + i
            meter.steps.append(number)
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            sums = run.sum_with_gradients(loss=loss.detach() * n, samples=n)
            loss.backward()
            optimizer.step()
            run.state["loss"] += sums["loss"]
            run.state["samples"] += sums["samples"]
            world = run.world
            if number == 5 and world.size == 3 and world.generation == 1 and world.rank:
                dist.barrier(group=pair)
                if world.rank == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.barrier(group=pair)

run.retry(train)
result = dict(model.state_dict())
result["loss"] = torch.tensor(run.state["loss"])
result["samples"] = torch.tensor(run.state["samples"])
own = {"steps": torch.tensor(meter.steps)}
torch.save(own, os.path.join(os.path.dirname(__file__), f"own-{os.getpid()}.pt"))
"""


@pytest.mark.parametrize("is_replaced", [False, True])
def test_sums_of_a_step_that_one_rank_has_committed_are_complete(
    runs: IdiomRuns, tmp_path: Path, is_replaced: bool
) -> None:
    """The rank that has not keeps its own state of the step before: that step is not in it."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + TORN)
    alone = runs.world.run(script, tmp_path / "alone", size=1)
    alone.assert_success(workers=1)
    outcome = runs.world.run(
        script, tmp_path / "job", size=3, death=BY_ITSELF, is_replaced=is_replaced
    )
    outcome.assert_success(workers=3 if is_replaced else 2)
    expected = alone.survivors[0].result
    assert expected["samples"] == 2 * 96
    for worker in outcome.survivors:
        for name, value in expected.items():
            torch.testing.assert_close(worker.result[name], value, rtol=0, atol=1e-9, msg=name)
    steps = [
        torch.load(tmp_path / f"own-{worker.pid}.pt")["steps"].tolist()
        for worker in outcome.survivors
    ]
    complete = list(range(16))
    assert steps[:2] == [complete, [n for n in complete if n != 5]]
    assert steps[2:] == ([complete[6:]] if is_replaced else [])


PARTLY = """
model = run.wrap(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, shuffle=True), global_batch=12)

def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            if run.world.rank != 1 or WHEN:
                run.sum_with_gradients(samples=len(inputs))
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()

run.retry(train)
result = {}
"""


@pytest.mark.parametrize("when", ["False", "i % 2 == 0", "i < 5"])
def test_a_rank_that_does_not_sum_ends_all_with_an_error(
    runs: IdiomRuns, tmp_path: Path, when: str
) -> None:
    """Buckets of different sizes would end the process inside gloo."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + PARTLY.replace("WHEN", when))
    outcome = runs.world.run(script, tmp_path / "job", size=3)
    assert not outcome.survivors
    # The host kills the others at the first end.
    assert {worker.exit_code for worker in outcome.workers} <= {1, None}, outcome.describe()
    assert "call it on all ranks with the same names" in outcome.describe()


EVAL_OF_THE_WRAPPER = """
model = run.wrap(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, shuffle=True), global_batch=12)

def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        model.eval()
        if run.is_main:
            model(x)
        network.train()

run.retry(train)
result = dict(model.state_dict())
"""


def test_a_module_whose_mode_was_restored_without_its_wrapper_trains(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    """As Lightning does after a validation."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + EVAL_OF_THE_WRAPPER)
    alone = runs.world.run(script, tmp_path / "alone", size=1)
    outcome = runs.world.run(script, tmp_path / "job", size=2)
    outcome.assert_success(workers=2)
    for name, value in alone.survivors[0].result.items():
        torch.testing.assert_close(outcome.survivors[1].result[name], value, rtol=0, atol=1e-9)


BUILT = """
import sys
from torch.distributed.fsdp import fully_shard

_, _, memory, disk, _ = sys.argv[1:]
os.environ["ELASTIC_MEMORY"] = memory
run = elastic.join(checkpoints=elastic.Checkpoints(disk, when=4, memory=3))
loader = run.loader(DataLoader(dataset, shuffle=True), global_batch=12)

class Meter:
    def __init__(self):
        self.steps = []
    def state_dict(self):
        return {"steps": self.steps}
    def load_state_dict(self, state):
        self.steps = state["steps"]

meter = Meter()
run.track(meter=meter, local=True)

def build(mesh):
    sharded = fully_shard(nn.Linear(4, 1), mesh=mesh)
    return sharded, torch.optim.SGD(sharded.parameters(), lr=0.01)

def train():
    model, optimizer = run.build(build)
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            meter.steps.append(8 * epoch + i)
            optimizer.zero_grad()
            others = {f"other{i}": 0.0 for i in range(9)}
            sums = run.sum_with_gradients(samples=len(inputs), **others)
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            die(8 * epoch + i, 9)
        run.state["samples"] = sums["samples"]

run.retry(train)
result = {"steps": torch.tensor(meter.steps), "samples": torch.tensor(run.state["samples"])}
"""


def test_local_state_returns_to_the_checkpoint_from_which_a_built_model_continues(
    runs: IdiomRuns,
) -> None:
    """Survivors repeat the steps since the last save to memory."""
    script = HEAD.replace("\nrun = elastic.join()\n", "\n") + BUILT
    outcome = runs.sharded(script, "build", "", 3, BY_ITSELF, is_replaced=False)
    outcome.assert_success(workers=2)
    for worker in outcome.survivors:
        assert worker.result["steps"].tolist() == list(range(16)), outcome.describe()
        assert worker.result["samples"] == 12


# The second of a step's backward passes is the first that numbers follow.
LATE = """
model = run.wrap(network, find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, shuffle=True), global_batch=12)

def train():
    run.state.setdefault("samples", 0.0)
    for epoch in run.epochs(1):
        for inputs, targets in loader:
            F.mse_loss(model(inputs), targets).backward()
            others = {f"other{i}": 0.0 for i in range(9)}
            sums = run.sum_with_gradients(samples=len(inputs), **others)
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.state["samples"] += sums["samples"]

run.retry(train)
result = {"samples": torch.tensor(run.state["samples"])}
"""


# The third pass reduces two modules, of which the second has not been reduced before.
GAN = """
model = run.wrap(network)
other = run.wrap(nn.Linear(1, 4))
optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, shuffle=True), global_batch=12)

def train():
    run.state.setdefault("samples", 0.0)
    for epoch in run.epochs(1):
        for inputs, targets in loader:
            F.mse_loss(model(inputs), targets).backward()
            made = other(targets)
            F.mse_loss(model(made.detach()), targets).backward()
            sums = run.sum_with_gradients(samples=len(inputs))
            F.mse_loss(model(made), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.state["samples"] += sums["samples"]

run.retry(train)
result = {"samples": torch.tensor(run.state["samples"])}
"""


@pytest.mark.parametrize("passes", [LATE, GAN], ids=["second", "third, of two modules"])
def test_sums_may_follow_a_later_backward_pass_than_the_first(
    runs: IdiomRuns, tmp_path: Path, passes: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + passes)
    outcome = runs.world.run(script, tmp_path / "job", size=3, is_counted=False)
    outcome.assert_success(workers=3)
    assert outcome.worlds == 1, "no collective has failed"
    assert all(worker.result["samples"] == 96 for worker in outcome.survivors)


# An evaluation whose data workers are kept, without torch.no_grad() around its loop.
KEPT = """
model = run.wrap(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, shuffle=True), global_batch=12)
held_out = DataLoader(dataset, batch_size=48, num_workers=1, persistent_workers=True)

def train():
    for epoch in run.epochs(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        model.eval()
        for inputs, targets in held_out:
            with torch.no_grad():
                model(inputs)
        model.train()

run.retry(train)
result = {}
"""


def test_another_loader_with_kept_workers_may_be_read_once_in_each_epoch(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(HEAD + KEPT)
    outcome = runs.world.run(script, tmp_path / "job", size=2, is_counted=False)
    outcome.assert_success(workers=2)
