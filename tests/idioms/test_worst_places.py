"""A death at a line where it once changed the result of a loop."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
import torch
from idiom_runs import IdiomRuns

from elastic.testing.small_world.world import Death

BY_ITSELF = Death(rank=2, event=1 << 40)  # the script chooses the line
JOIN = "elastic.join()"
# Every copy and every digest is too expensive to be taken in each step.
LEAN = """
from elastic.train import rollback
rollback.COPY_IS_CHEAP_S = rollback.AFFORDABLE_FRACTION = 0.0
"""
HEAD = f"""
import copy, os, signal
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import elastic

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(96, 4)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
network = nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 64), nn.Linear(64, 1))

def die(step, at):
    "The last rank of the first world ends itself here, as soon as all are here."
    world = run.world
    if step == at and world.size == 3 and world.generation == 1:
        dist.barrier()
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

run = {JOIN}
"""
TRAINED = """
model = run.wrap(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, shuffle=True), global_batch=12)
"""
TAIL = """
run.retry(train)
result = dict(model.state_dict())
"""
STEP = "optimizer.zero_grad(); F.mse_loss(model(inputs), targets).backward(); optimizer.step()"

LOOPS = {
    "an optimizer that counts its steps, and decays after the update": """
class Counting(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for p in group["params"]:
                p.mul_(1 - 0.001 * self.state["steps"] * group["seen"])
optimizer = Counting(model.parameters(), lr=0.01, momentum=0.9)
run.track(counting=optimizer)
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            STEP
            die(epoch * 8 + i, at)
""",
    "a loss that is read after an evaluation": """
def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        run.mean(1, evaluated=0.5)
        die(at, at)
        with torch.no_grad():
            network[0].weight.add_(torch.randn_like(network[0].weight), alpha=0.01)
        print(f"epoch {epoch}: {loss.item()}")
""",
    "a rate that follows the mean loss": """
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0)
run.track(scheduler=scheduler)
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            die(epoch * 8 + i, at)
            scheduler.step(run.mean(len(inputs), loss=loss.detach())["loss"])
""",
    "weights and rates that are set by the function that is called again": """
before = copy.deepcopy(network.state_dict())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
run.track(scheduler=scheduler)
def train():
    for name, p in network.named_parameters():
        p.data = before[name].clone()
    for epoch in run.epochs(2):
        if epoch:
            scheduler.step()
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            STEP
            die(epoch * 8 + i, at)
""",
    "averages in place of the weights in an evaluation": """
shadow = copy.deepcopy(network)
run.track(shadow=shadow)
def swap():
    for p, q in zip(network.parameters(), shadow.parameters()):
        p.data, q.data = q.data, p.data
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            STEP
            for p, q in zip(network.parameters(), shadow.parameters()):
                q.data.lerp_(p.data, 0.1)
        swap()
        die(epoch, at % 2)
        run.mean(1.0, loss=F.mse_loss(network(x), x.sum(1, keepdim=True)).detach())
        swap()
""",
    "accumulation": """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader):
            (F.mse_loss(model(inputs), targets) / 4).backward()
            die(run.state.get("i", 0), at)
            run.state["i"] = run.state.get("i", 0) + 1
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
""",
    "accumulation without synchronization": """
from contextlib import nullcontext
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader):
            with model.no_sync() if (i + 1) % 4 else nullcontext():
                (F.mse_loss(model(inputs), targets) / 4).backward()
            die(run.state.get("i", 0), at)
            run.state["i"] = run.state.get("i", 0) + 1
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
""",
    "callback": """
@run.after_step
def average(step):
    with torch.no_grad():
        for e, p in zip(ema.parameters(), model.parameters()):
            e.lerp_(p, 0.1)

@run.after_step
def note(step):
    die(step.number, at)
    run.state["calls"] = run.state.get("calls", 0) + 1

def train():
    for epoch in run.epochs(2):
        for inputs, targets in loader:
            STEP
""",
    "gradient descent by hand": """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            model.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
            die(epoch * 8 + i, at)
""",
    "gradient descent through .data": """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            model.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            for p in model.parameters():
                p.data -= 0.01 * p.grad.data
            die(epoch * 8 + i, at)
""",
    "weights scaled through .data before an update": """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            if epoch * 8 + i == 11:
                for p in model.parameters():
                    p.data.mul_(0.9)
            die(epoch * 8 + i, at + 6)
            STEP
""",
    "gradients summed up by hand": """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            loss = F.mse_loss(network(inputs), targets, reduction="sum") / 12
            gradients = torch.autograd.grad(loss, list(network.parameters()))
            if run.world.rank == 2 and run.world.generation == 1 and epoch * 8 + i == at:
                os.kill(os.getpid(), signal.SIGKILL)
            with torch.no_grad():
                for p, g in zip(network.parameters(), gradients):
                    dist.all_reduce(g)
                    p -= 0.01 * g
""",
    "gradients summed up by hand, for the next step": """
class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        for i, p in enumerate(network.parameters()):
            self.register_buffer(f"sum{i}", torch.zeros_like(p))
sums = Sums()
run.track(sums=sums)
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            with torch.no_grad():
                for p, g in zip(network.parameters(), sums.buffers()):
                    p -= 0.01 * g
            loss = F.mse_loss(network(inputs), targets, reduction="sum") / 12
            gradients = torch.autograd.grad(loss, list(network.parameters()))
            if run.world.rank == 2 and run.world.generation == 1 and epoch * 8 + i == at:
                os.kill(os.getpid(), signal.SIGKILL)
            for s, g in zip(sums.buffers(), gradients):
                s.copy_(g)
                dist.all_reduce(s)
""",
    "sharpness-aware minimization": """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            F.mse_loss(model(inputs), targets).backward()
            shifts = []
            with torch.no_grad():
                for p in model.parameters():
                    shifts.append(0.05 * p.grad / p.grad.norm())
                    p.add_(shifts[-1])
            optimizer.zero_grad()
            die(epoch * 8 + i, at)
            F.mse_loss(model(inputs), targets).backward()
            with torch.no_grad():
                for p, shift in zip(model.parameters(), shifts):
                    p.sub_(shift)
            optimizer.step()
            optimizer.zero_grad()
""",
    "weights shrunk after the update": """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            STEP
            for p in model.parameters():
                p.data.mul_(0.99)
            die(epoch * 8 + i, at)
""",
    "large moving average in the loop": """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            STEP
            with torch.no_grad():
                for e, p in zip(ema.parameters(), model.parameters()):
                    e.lerp_(p, 0.1)
            die(epoch * 8 + i, at)
""",
    "collective of the script's own, not waited for yet": """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            world = run.world
            if (epoch * 8 + i, world.size, world.generation, world.rank) == (at, 3, 1, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            seen = dist.is_initialized() and dist.all_reduce(torch.ones(1 << 20), async_op=True)
            STEP
            if seen:
                seen.wait()
""",
    "two optimizers, one after the other": """
head_optimizer = torch.optim.Adam(model.module[2:].parameters(), lr=0.01)
body_optimizer = torch.optim.Adam(model.module[0].parameters(), lr=0.01)
run.track(head=head_optimizer, body=body_optimizer)
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            model.zero_grad()
            norm = model.module[2].weight.detach().norm()
            F.mse_loss(model(inputs), targets).backward()
            head_optimizer.step()
            die(epoch * 8 + i, at)
            with torch.no_grad():
                for p in model.module[0].parameters():
                    p.grad.mul_(norm)
            body_optimizer.step()
""",
}
WITH_AVERAGE = """
ema = copy.deepcopy(network)
run.track(ema=ema)
"""


def script_of(loop: str, at: int, *, is_lean: bool) -> str:
    body = LOOPS[loop].replace("STEP", STEP)
    average = WITH_AVERAGE if "ema" in body else ""
    tail = TAIL + (
        "result |= {f'ema.{k}': v for k, v in ema.state_dict().items()}\n" * bool(average)
    )
    counted = "result['calls'] = run.state['calls']\n" if "calls" in body else ""
    return f"{HEAD}{LEAN * is_lean}\nat = {at}\n{TRAINED}{average}\n{dedent(body)}\n{tail}{counted}"


# Parts of the generator's scripts, too.
ALSO_GENERATED = (
    "a rate that follows the mean loss",
    "accumulation",
    "accumulation without synchronization",
    "gradient descent by hand",
    "gradients summed up by hand",
    "large moving average in the loop",
    "sharpness-aware minimization",
    "two optimizers, one after the other",
    "weights shrunk after the update",
)


def also_generated(loop: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if loop in ALSO_GENERATED else []


@pytest.mark.parametrize(
    ("at", "is_lean"),
    [
        pytest.param(0, False, marks=pytest.mark.slow),
        pytest.param(5, False, marks=pytest.mark.slow),
        pytest.param(5, True),
    ],
)
@pytest.mark.parametrize("loop", [pytest.param(n, marks=also_generated(n)) for n in LOOPS])
def test_a_death_at_a_critical_line_does_not_change_the_result(
    runs: IdiomRuns, tmp_path: Path, loop: str, at: int, is_lean: bool
) -> None:
    """In the first steps of a process, and after some steps, with copies and without them."""
    script = tmp_path / "script.py"
    script.write_text(script_of(loop, at, is_lean=is_lean))
    alone = runs.world.run(script, tmp_path / "alone", size=1)
    alone.assert_success(workers=1)
    outcome = runs.world.run(script, tmp_path / "killed", size=3, death=BY_ITSELF)
    outcome.assert_success(workers=2)
    assert outcome.worlds == 2
    for survivor in outcome.survivors:
        for name, expected in alone.survivors[0].result.items():
            is_close = torch.allclose(survivor.result[name], expected, rtol=1e-6, atol=1e-6)
            assert is_close, f"{name} of {survivor.name}\n{outcome.describe()}"


REFUSED = {
    "range instead of run.epochs, which may be left early": (
        TRAINED
        + """
def train():
    for epoch in range(run.world.size):
        for inputs, targets in loader:
            STEP
        if epoch == 2:
            break
""",
        "this is the second pass over the loader without run.epochs",
    ),
    "run.wrap is forgotten": (
        """
model = network
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.track(optimizer=optimizer)
loader = run.loader(DataLoader(dataset, shuffle=True), global_batch=12)
def train():
    for inputs, targets in loader:
        STEP
""",
        "updates parameters at step 0 that are in no wrapped or tracked module",
    ),
    "the next batch is fetched before the backward pass": (
        TRAINED
        + """
run.untracked("inputs", "targets")
def train():
    batches = iter(loader)
    inputs, targets = next(batches)
    while True:
        loss = F.mse_loss(model(inputs), targets)
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
""",
        "with gradients of a forward pass in the previous step",
    ),
    "DistributedSampler before there is a process group": (
        """
from torch.utils.data.distributed import DistributedSampler
model = run.wrap(network)
loader = run.loader(DataLoader(dataset, sampler=DistributedSampler(dataset)), global_batch=12)
def train():
    pass
""",
        "replaces DistributedSampler",
    ),
    "DistributedDataParallel before there is a process group": (
        """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(network)
def train():
    pass
""",
        "run.wrap(model) replaces DistributedDataParallel(model)",
    ),
    "noise that each rank draws for itself": (
        TRAINED
        + """
def train():
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        for p in model.parameters():
            p.grad += 0.1 * torch.randn_like(p.grad)
        optimizer.step()
""",
        "has different weights from rank 0 in model",
    ),
    "a weight that one rank changes later": (
        TRAINED
        + """
def train():
    for inputs, targets in loader:
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if loader.index == 5 and run.world.rank == 1:
            model.module[0].bias.data[1] *= 1 + 1e-9
""",
        "after step 7, rank 1 has different weights from rank 0 in model (parameter 1, '0.bias') "
        "since one of steps 4 to 6",
    ),
    "a weight that one rank changes later, and gradients summed up by hand": (
        """
model = run.wrap(network)
loader = run.loader(DataLoader(dataset, shuffle=True), global_batch=12)
def train():
    for i, (inputs, targets) in enumerate(loader):
        loss = F.mse_loss(network(inputs), targets, reduction="sum") / 12
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        with torch.no_grad():
            for p, g in zip(network.parameters(), gradients):
                dist.all_reduce(g)
                p -= 0.01 * g
        if i == 3 and run.world.rank == 1:
            network[0].bias.data[1] *= 1 + 1e-9
""",
        "after step 4, rank 1 has different weights from rank 0 in model (parameter 1, '0.bias')",
    ),
}


def test_weights_torn_on_all_ranks_are_not_replaced_by_initial_ones(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    """All ranks are interrupted in the script's own first change of the weights, without copies."""
    script = tmp_path / "script.py"
    head = HEAD.replace(JOIN, 'elastic.join(step_copies="never")')
    body = """
def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            if i == 5 and epoch == 0:
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(0.9)
                die(5, 5)
            STEP
"""
    script.write_text(head + TRAINED + body.replace("STEP", STEP) + TAIL)
    outcome = runs.world.run(script, tmp_path / "job", size=3, death=BY_ITSELF)
    assert not outcome.survivors, outcome.describe()
    assert "CheckpointRequired" in outcome.describe()
    assert {w.exit_code for w in outcome.workers} <= {65, None}


def test_state_set_on_one_rank_only_causes_a_warning(runs: IdiomRuns, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    body = """
def train():
    for inputs, targets in loader:
        STEP
        if run.is_main:
            run.state["best"] = 0.5
"""
    script.write_text(HEAD + TRAINED + body.replace("STEP", STEP) + TAIL)
    outcome = runs.world.run(script, tmp_path / "job", size=3)
    outcome.assert_success(workers=3)
    assert "run.state differs between ranks in 'best'" in outcome.describe()
    assert outcome.describe().count("run.state differs") == 3, "once per process"


def test_state_is_restored_before_the_function_reads_it(runs: IdiomRuns, tmp_path: Path) -> None:
    """In every mode: a completed job does not train again when it is restarted."""
    script = tmp_path / "script.py"
    head = HEAD.replace(JOIN, f"elastic.join(checkpoints={str(tmp_path / 'saved')!r})")
    body = """
passes = 0
def train():
    global passes
    while run.state.get("epoch", 0) < 2:
        for inputs, targets in loader:
            STEP
        run.state["epoch"] = run.state.get("epoch", 0) + 1
        passes += 1
"""
    tail = TAIL + "result['passes'] = passes\n"
    script.write_text(head + TRAINED + body.replace("STEP", STEP) + tail)
    for expected in (2, 0):
        outcome = runs.world.run(script, tmp_path / f"job-{expected}", size=1)
        outcome.assert_success(workers=1)
        assert outcome.survivors[0].result["passes"].item() == expected


def test_state_is_restored_for_a_function_that_creates_all_objects(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    """Its replacement does not start counting at 0."""
    script = tmp_path / "script.py"
    made = TRAINED.replace("\n", "\n    ")
    body = f"""
def train():
    global model
    network = nn.Linear(4, 1)
    {made}
    while run.state.get("epoch", 0) < 2:
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            STEP
            die(run.state.get("epoch", 0) * 8 + i, 11)
        run.state["epoch"] = run.state.get("epoch", 0) + 1
"""
    script.write_text(HEAD + body.replace("STEP", STEP) + TAIL)
    outcome = runs.world.run(script, tmp_path / "job", size=3, death=BY_ITSELF, is_replaced=True)
    outcome.assert_success(workers=3)
    assert {w.steps for w in outcome.survivors} == {16}


def test_weights_that_the_function_loads_do_not_replace_restored_ones(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    """After a restart, and in a job that goes on for another epoch."""
    script = tmp_path / "script.py"
    body = """
before = copy.deepcopy(network.state_dict())
def train():
    network.load_state_dict(before)
    for epoch in run.epochs(EPOCHS):
        for inputs, targets in loader:
            STEP
"""

    def trained(folder: str, epochs: int) -> dict[str, torch.Tensor]:
        saved = f"elastic.join(checkpoints={str(tmp_path / folder)!r})"
        head = f"EPOCHS = {epochs}\n" + HEAD.replace(JOIN, saved)
        script.write_text(head + TRAINED + body.replace("STEP", STEP) + TAIL)
        outcome = runs.world.run(script, tmp_path / f"{folder}-{epochs}", size=1)
        outcome.assert_success(workers=1)
        return outcome.survivors[0].result

    undisturbed = trained("one", 2)
    trained("two", 1)
    continued = trained("two", 2)
    for name, value in undisturbed.items():
        assert torch.equal(continued[name], value), name


@pytest.mark.parametrize("loop", REFUSED)
def test_loops_with_silently_wrong_results_are_rejected(
    runs: IdiomRuns, tmp_path: Path, loop: str
) -> None:
    body, message = REFUSED[loop]
    script = tmp_path / "script.py"
    script.write_text(HEAD + dedent(body).replace("STEP", STEP) + TAIL)
    outcome = runs.world.run(script, tmp_path / "job", size=3, death=BY_ITSELF)
    assert not outcome.survivors
    assert message in outcome.describe()
