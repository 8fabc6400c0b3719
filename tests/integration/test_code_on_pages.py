"""The code and commands of README, tutorial and how-tos run as they are printed.

Each Python block is a script of its own, within what its page takes for granted (``SETTINGS``): a
data set, a model, the loop around it. The commands of all pages are entered in one folder, while a
job trains there. What one machine does not have is marked on the page, by the comment
``<!-- needs a cluster -->`` above the block. The tutorial's commands have a test of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent
from uuid import uuid4

import pytest

from elastic.store.embedded import EmbeddedEtcd
from elastic.testing.node import LocalNode

REPOSITORY = Path(__file__).parents[2]
HOW_TOS = sorted(f"docs/how-to/{path.name}" for path in (REPOSITORY / "docs/how-to").glob("*.md"))
PAGES = ("README.md", "docs/tutorial.md", "docs/data.md", *HOW_TOS)
BLOCK = re.compile(r"^(<!-- needs a cluster -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEADLINE_S = 300.0  # of a process that imports torch, on a busy machine

IMPORTS = """
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import elastic

torch.manual_seed(0)
seed = 0
features = torch.randn(512, 4)
dataset = val = TensorDataset(features, (features.sum(1) > 0).long())
a, b = dataset, dataset
Net = lambda: nn.Linear(4, 2)
tqdm = lambda iterable, **_: iterable
"""
JOINED = """
run = elastic.join(checkpoints="job")
model = run.wrap(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
run.track(optimizer=optimizer, scheduler=scheduler)
run.state.setdefault("best", 0.0)
loss_of = lambda x, y: F.cross_entropy(model(x), y)
get_batch = lambda split: dataset[torch.randint(512, (8,))]

def train_one_epoch():
    for x, y in loader:
        STEP
"""
STEP = "optimizer.zero_grad(); F.cross_entropy(model(x), y).backward(); optimizer.step()"
LOADER = "loader = run.loader(DataLoader(dataset, batch_size=8))\n"
IN_RETRY = "def train():\n    for epoch in run.epochs(1):\n        BLOCK\nrun.retry(train)"
IN_LOOP = """
def train():
    for step in run.steps(loader):
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            BLOCK
            loss.backward(); optimizer.step(); optimizer.zero_grad()
run.retry(train)
"""
TRAIN = IN_LOOP.replace("            BLOCK\n", "")
ACCUMULATING = """
def train():
    for step in run.steps(loader):
        optimizer.zero_grad()
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
run.retry(train)
"""
TOKENS = """
data = DataLoader(TensorDataset(torch.randn(64, 5, 4), torch.randint(2, (64, 5))), batch_size=8)
"""
LOADERS = """
loader, eval_loader = (DataLoader(dataset, batch_size=8, shuffle=True) for _ in range(2))
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
SCHEDULER = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)\n"
TRAINER = """
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def forward(self, x, labels):
        return {"loss": F.cross_entropy(self.net(x), labels)}

args = TrainingArguments("output", max_steps=3, report_to="none", use_cpu=True)
rows = [{"x": x, "labels": y} for x, y in dataset]
Trainer(Classifier(), args, train_dataset=rows).train()
"""
LIGHTNING = """
from lightning import LightningDataModule, LightningModule, Trainer

class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(dataset, batch_size=8, shuffle=True)

model, data = Classifier(), Data()
"""
WANDB = """
class wandb:
    step, values = 0, []
    @classmethod
    def init(cls, **options):
        return cls()
    def log(self, values, step):
        self.values.append((step, values))
    def finish(self): ...
"""
REGRESSION = """
epochs = 1
features = torch.randn(96, 4)
dataset = TensorDataset(features, features.sum(1, keepdim=True).tanh())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last = nn.Linear(4, 1)
    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return self.last(x)

loss_of = F.mse_loss
from torch.distributed.fsdp import fully_shard
"""
PIPELINING = """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
stages = [nn.Linear(4, 4), nn.Linear(4, 1)]
"""
EXPERTS = """
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
EXPERTS, WIDTH, HIDDEN = 4, 4, 8

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.last = Experts(), nn.Linear(WIDTH, 1)
"""
OWN_LOOP = """
import json, os
import checkpoints
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_optimizer_state_dict, set_optimizer_state_dict
)
device, folder, mesh = torch.device("cpu"), "job", None  # over all ranks
data_size, data_rank = 2, int(os.environ["RANK"])

def loss_of(model, indices):
    x = features[list(indices)]
    return F.mse_loss(model(x), x[:, :1], reduction="sum")
"""


@dataclass(frozen=True)
class Setting:
    """What a page takes for granted around a block: ``BLOCK`` is its place in ``around``."""

    before: str = JOINED
    around: str = "BLOCK"
    ranks: int = 1
    # Text of the block -> what stands for it here, for example for an ellipsis.
    replaced: dict[str, str] = field(default_factory=dict)


FABRIC = """
from elastic.integrations.fabric import ElasticFabric as Fabric
run = elastic.join(checkpoints="job", seed=42)
loss_of = lambda batch: F.cross_entropy(model(batch[0]), batch[1])
"""
SET_UP = "fabric.launch(); model, optimizer = fabric.setup(model, optimizer); "
SET_UP += "loader = fabric.setup_dataloaders(loader)"
TRAINER_STATE = """
class State:
    step, evaluation_due = 0, False
    state_dict = lambda self: {"step": self.step, "due": self.evaluation_due}
    def load_state_dict(self, values):
        self.step, self.evaluation_due = values["step"], values["due"]

state = State()
run.track(state=state)

def evaluate():
    state.evaluation_due = False
"""
SUMS = """
class Sums:
    loss = samples = 0

class Trainer:
    loop = Sums()
    def loss_of(self, batch):
        return F.cross_entropy(model(batch[0]), batch[1])
    def __len__(self): return 8
BLOCK
def train():
    trainer = Trainer()
    for batch in loader:
        optimizer.zero_grad()
        trainer.training_step(batch[0])
        optimizer.step()
        trainer.after_update()
        run.commit()
"""
MICRO_BATCHES = """
dataloader = DataLoader(dataset, batch_size=8)
order = lambda epoch: list(range(512))
accumulation_steps = 2
"""
EPOCHS = """
run.state.setdefault("epoch", 0)
on_epoch_end = lambda epoch: None
"""
PLAIN = Setting("")
WHOLE = "def train():\n    BLOCK\nrun.retry(train)"
DOTS = {"...": STEP}
IN_EPOCH = Setting(JOINED + LOADER, IN_RETRY)
IN_STEP = Setting(JOINED + LOADER, IN_LOOP)
OF_BATCH_DOTS = {"...": "optimizer.zero_grad(); loss_of(*batch).backward(); optimizer.step()"}
UPDATED = {"...": "optimizer.zero_grad(); loss_of(x, y).backward()"}
SUMMED = {"...": "loss = loss_of(x, y); optimizer.zero_grad(); loss.backward(); optimizer.step()"}
OF_BATCH = "loss = F.cross_entropy(model(batch[0]), batch[1])"
ACCUMULATED = f"{OF_BATCH}; accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()"
SETTINGS: dict[str, list[Setting]] = {
    "README.md": [PLAIN],
    "docs/tutorial.md": [PLAIN] * 5,  # parts of one script
    "docs/data.md": [
        Setting(),
        Setting(JOINED + TOKENS),
        Setting(JOINED + "loss_of = lambda batch: F.cross_entropy(model(batch[0]), batch[1])\n"),
        Setting(replaced=DOTS),
        Setting(JOINED + LOADER, replaced=DOTS),
        Setting(JOINED + LOADER),
        Setting(JOINED + LOADER, WHOLE, replaced=SUMMED),
        Setting(replaced=DOTS),
        Setting(JOINED + LOADER),
        Setting(JOINED + LOADER),
    ],
    "docs/how-to/accelerate.md": [Setting(LOADERS + SCHEDULER, replaced={"…": ACCUMULATED})],
    "docs/how-to/adopt.md": [Setting(replaced={"10_000": "3"})],
    "docs/how-to/fabric.md": [
        Setting(LOADERS, replaced={"…": f"{OF_BATCH}; optimizer.zero_grad()"}),
        Setting(LOADERS + FABRIC, replaced={"…": SET_UP}),
    ],
    "docs/how-to/hugging-face.md": [
        Setting("", f"BLOCK\n{TRAINER}"),
        PLAIN,
        Setting("", f"BLOCK\nfrom transformers import Trainer, TrainingArguments\n{TRAINER}"),
    ],
    "docs/how-to/integrations.md": [
        Setting(JOINED + MICRO_BATCHES, f"BLOCK\n{ACCUMULATING}"),
        Setting(JOINED + LOADER, "BLOCK\n" + TRAIN.replace("run.steps(loader)", "[batches()]")),
        Setting(JOINED + LOADER + "evaluate = lambda: 0.5\n", WHOLE, replaced=DOTS),
        Setting(JOINED + LOADER + TRAINER_STATE, "BLOCK\nrun.retry(train)", replaced=OF_BATCH_DOTS),
        Setting(JOINED + LOADER + "log_if_wanted = print\n", IN_RETRY, replaced=UPDATED),
        Setting(JOINED + LOADER + EPOCHS, replaced=DOTS),
        Setting(JOINED + LOADER, SUMS),
    ],
    "docs/how-to/lightning.md": [
        Setting(LIGHTNING, replaced={"devices=8, …": "max_epochs=1, logger=False"})
    ],
    "docs/how-to/metrics.md": [
        IN_EPOCH,
        Setting(JOINED + LOADER, IN_LOOP.replace("loss.backward(); ", "")),
        IN_STEP,
        IN_STEP,
        Setting(
            WANDB,
            "BLOCK\nw = WandbWriter('p', 'r'); w.rewind(0); w.log(0, {'loss': 1.0}); w.close()",
        ),
    ],
    "docs/how-to/pipeline.md": [
        Setting(REGRESSION + PIPELINING, ranks=2),
        Setting(REGRESSION + EXPERTS, ranks=4, replaced={"…": "return tokens @ up[0]"}),
    ],
    "docs/how-to/preemption.md": [Setting("", replaced={"s3://bucket/job-1": "job"})],
    "docs/how-to/profile.md": [
        Setting(
            JOINED + LOADER,
            "BLOCK\nrun.retry(train_one_epoch)",
            replaced={"run.profile(steps=range(": "# or run.profile(steps=range("},  # one at a time
        )
    ],
    "docs/how-to/replicas.md": [Setting(REGRESSION, ranks=2)],
    "docs/how-to/samplers.md": [Setting()],
    "docs/how-to/sharded.md": [
        Setting(REGRESSION, ranks=2),
        Setting(REGRESSION, ranks=2),
        Setting(REGRESSION + OWN_LOOP, ranks=2),
    ],
}


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    page: str
    language: str
    text: str
    needs_cluster: bool

    @property
    def script(self) -> str:
        """Its Python; of a difference, what the script is like afterwards."""
        lines = self.text.splitlines()
        if self.language == "diff":
            lines = [line[1:] for line in lines if not line.startswith("-")]
        return "\n".join(lines)


def blocks_of(page: str, *languages: str) -> list[Block]:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    blocks = [Block(page, b[2], b[3], bool(b[1])) for b in BLOCK.finditer(text)]
    return [block for block in blocks if block.language in languages]


def code_on(page: str) -> list[Block]:
    return blocks_of(page, "python", "diff")


def within(setting: Setting, block: Block) -> str:
    """The script that consists of the block and what its page takes for granted."""
    code = block.script
    for text, meant in {**setting.replaced, "/mnt/shared/": "", "/shared/": ""}.items():
        assert text in code or text.startswith("/"), f"the block does not contain {text!r}"
        code = code.replace(text, meant)
    around = re.sub(
        r"^( *)BLOCK$", lambda place: indent(code, place[1]), setting.around, flags=re.MULTILINE
    )
    return f"{IMPORTS}{setting.before}\n{around}\n".replace("STEP", STEP)


def assert_runs(script: str, folder: Path, ranks: int = 1) -> None:
    if "from trl import" in script:  # in no environment of this project's own
        pytest.importorskip("trl")
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    launcher = ["-m", "elastic.cli.main", "run", "--embedded-etcd", "--nnodes=1"]
    done = subprocess.run(
        [
            sys.executable,
            *([*launcher, f"--nproc-per-node={ranks}"] if ranks > 1 else []),
            str(path),
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ELASTIC_TENSORBOARD": "off"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stderr[-3000:]}"


def test_each_block_has_a_language_and_a_test() -> None:
    for page in PAGES:
        assert page == "docs/tutorial.md" or not blocks_of(page, ""), f"{page}: name a language"
        settings = SETTINGS.get(page, [])
        assert len(settings) == len(code_on(page)), f"{page}: SETTINGS has {len(settings)} blocks"


def test_the_difference_in_the_readme_trains(tmp_path: Path) -> None:
    (block,) = code_on("README.md")
    assert "run.retry(train)" in block.script
    assert_runs(within(PLAIN, block), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "number"),
    [
        (page, number)
        for page, settings in SETTINGS.items()
        for number in range(len(settings))
        if page not in ("README.md", "docs/tutorial.md")
    ],
)
def test_the_code_on_a_page_runs(tmp_path: Path, page: str, number: int) -> None:
    setting, block = SETTINGS[page][number], code_on(page)[number]
    assert_runs(within(setting, block), tmp_path, setting.ranks)


def test_the_code_of_the_tutorial_is_that_of_its_script() -> None:
    port = (REPOSITORY / "examples/migrate/ddp_tutorial/after.py").read_text(encoding="utf-8")
    lines = [line.partition("  #")[0].strip() for line in port.splitlines()]
    missing = [
        line
        for block in code_on("docs/tutorial.md")
        for line in block.script.splitlines()
        if line.strip() and line.strip() not in lines
    ]
    assert missing == []


# A job that trains until it is stopped, and one that trains for a moment.
TRAINING = """
import time
def train():
    for epoch in run.epochs(EPOCHS):
        for x, y in loader:
            STEP
            run.log(loss=0.5)
            time.sleep(PAUSE_S)
run.retry(train)
"""
# Tested elsewhere: the installation by each run of CI, the demo by its own tests.
NOT_RUN = ("pip install ", "make ", "elastic demo", "#")
# These end the job that the other pages look at.
LAST = ("docs/how-to/preemption.md", "docs/how-to/report.md")


def commands_on(page: str) -> list[str]:
    """The commands of a page that one machine can run; continued lines are one."""
    blocks = [block for block in blocks_of(page, "bash") if not block.needs_cluster]
    lines = "".join(block.text for block in blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if not line.startswith(NOT_RUN)]


class Terminal:
    """A folder in which commands are entered, as a reader of the pages does."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self._replaced = {
            "etcd:2379": endpoint,
            "/shared/": f"{folder}/shared/",
            "0.0.0.0": "127.0.0.1",
            "0,8-15": "0-1",  # ranks of a larger job
            " …": "",
        }
        self.folder = folder
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("ELASTIC_", "PET_"))},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "XDG_STATE_HOME": str(folder / "state"),
            "ELASTIC_JOURNAL": str(folder / "shared" / "journals"),
            "ELASTIC_TENSORBOARD": "off",
            "OMP_NUM_THREADS": "1",
        }
        for name, epochs, pause_s in (("train.py", "1", "0"), ("long.py", "10**6", "0.1")):
            code = TRAINING.replace("EPOCHS", epochs).replace("PAUSE_S", pause_s)
            joined = JOINED.replace('"job"', f'"{name}.job"')
            script = (IMPORTS + joined + LOADER + code).replace("STEP", STEP)
            (folder / name).write_text(script, encoding="utf-8")
        (folder / "shared" / "job-1").mkdir(parents=True)

    def start(self, command: str) -> LocalNode:
        log = self.folder / f"{uuid4().hex}.log"
        bash = ["bash", "-c", f"exec {self._here(command)}"]
        return LocalNode("job", bash, self.environment, uuid4().hex, log, folder=self.folder)

    def enter(self, command: str) -> None:
        """Run a command to its end; a server until it says its address."""
        if command.startswith("elastic dashboard"):
            server = self.start(f"{command} --port 0")
            try:
                wait_for_text(server, "elastic dashboard: http")
            finally:
                server.kill()
            return
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", self._here(command)],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"

    def _here(self, command: str) -> str:
        for text, meant in self._replaced.items():
            command = command.replace(text, meant)
        return command


def wait_for_text(node: LocalNode, text: str) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while text not in node.log_text():
        assert node.running, node.log_text()[-2000:]
        assert time.monotonic() < until_s, f"no {text!r} in\n{node.log_text()[-2000:]}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def terminal(
    tmp_path_factory: pytest.TempPathFactory, shared_etcd: EmbeddedEtcd
) -> Iterator[Terminal]:
    """A terminal beside a job that trains."""
    terminal = Terminal(tmp_path_factory.mktemp("terminal"), shared_etcd.endpoint)
    address = "--rdzv-endpoint etcd:2379 --rdzv-id llama-7"
    job = terminal.start(f"elastic run --nodes-local 2 --nnodes 1:2 {address} long.py")
    try:
        terminal.enter(f"elastic wait {address} --for nodes=2 --timeout 5m")
        yield terminal
    finally:
        job.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    sorted((page for page in PAGES if commands_on(page)), key=lambda page: (page in LAST, page)),
)
def test_the_commands_on_a_page_succeed(terminal: Terminal, page: str) -> None:
    if "jq" in "".join(commands_on(page)) and shutil.which("jq") is None:
        pytest.skip("needs Debian's package jq")
    for command in commands_on(page):
        terminal.enter(command)
