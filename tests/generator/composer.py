"""Composes training scripts from parts, at random from a seed.

A script reads as a person would write it, and stands alone: ``python script.py`` trains without a
launcher.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from textwrap import indent

from script_parts import DEFAULTS, OPTIONAL, REQUIRED, Part

IMPORTS = """import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic
"""
DATA = """torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
EPOCHS = 3
x = torch.randn(44, 4)


def targets_of(inputs):
    return inputs.sin().sum(1, keepdim=True)


dataset = TensorDataset(x, targets_of(x))


def leaves(name, value):
    # All numbers and tensors of a nested state.
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        is_number = torch.is_tensor(value) or type(value) in (int, float)
        return {name: value.clone() if torch.is_tensor(value) else value} if is_number else {}
    return {k: v for key, item in items for k, v in leaves(f"{name}.{key}", item).items()}
"""
# Every copy and every digest is too expensive to be taken in each step.
SELDOM = """from elastic.train import rollback

rollback.COPY_IS_CHEAP_S = rollback.AFFORDABLE_FRACTION = 0.0
"""
RETRY, ATTEMPTS, RESTART = "run.retry", "run.attempts", "restart"
EACH_EPOCH = "run.retry of each epoch"
WHOLE, REPLICAS, MESH, BUILD = "", "replicas", "mesh", "build"
SHARDED = {
    REPLICAS: """
def sharded(module, mesh):
    if isinstance(module, nn.ModuleDict):
        for part in module.values():
            fully_shard(part, mesh=mesh)
        return module
    return fully_shard(module, mesh=mesh)
""",
    MESH: """
def sharded(module, mesh):
    plan = {"body": ColwiseParallel(), "head": RowwiseParallel()}
    return parallelize_module(module, mesh, plan)
""",
}
SHARDED[BUILD] = SHARDED[REPLICAS]
_FSDP = "from torch.distributed.fsdp import fully_shard"
_PARALLEL = (
    "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, "
    "parallelize_module"
)
PROPERTIES = {
    WHOLE: set[str](),
    REPLICAS: {"sharded", "fsdp"},
    MESH: {"sharded", "tensor parallel"},
    BUILD: {"sharded", "fsdp", "build"},
}


@dataclass(frozen=True)
class Script:
    """A combination of parts. Its text is determined by it."""

    parts: tuple[Part, ...]
    recovery: str = RETRY  # or ATTEMPTS, or RESTART: neither
    has_checkpoints: bool = False  # in the folder that is its first argument
    sharding: str = WHOLE  # or REPLICAS (FSDP), MESH (tensor parallel), or BUILD: over the world
    is_inside: bool = False  # model, optimizer and loader are created in the training function
    is_copied_seldom: bool = False  # as if copies of the weights were expensive

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(part.label for part in self.parts)

    @property
    def added(self) -> tuple[str, ...]:
        """The parts that are not those of the plainest script."""
        plainest = {part.label for part in DEFAULTS.values()}
        return tuple(label for label in self.labels if label not in plainest)

    @property
    def way(self) -> str:
        """How it is sharded, and how it recovers."""
        words = [self.sharding, self.recovery, "all in the function" if self.is_inside else ""]
        words += ["copied seldom"] if self.is_copied_seldom else []
        return " ".join(word for word in words if word)

    @property
    def has_inner_result(self) -> bool:
        """Whether the training function computes the result at its end."""
        return bool(self.sharding) or self.is_inside

    @property
    def draws_by_rank(self) -> bool:
        """Whether its result depends on the number of ranks."""
        return any(part.draws_by_rank for part in self.parts)

    @property
    def is_in_float32(self) -> bool:
        """Whether another order of sums changes its result by more than 1e-10."""
        return any("float32" in part.gives for part in self.parts)

    def smaller(self) -> Iterable[Script]:
        """The valid scripts with one part less, or with one of the plainest instead."""
        for part in self.parts:
            rest = [other for other in self.parts if other is not part]
            if (plainest := DEFAULTS.get(part.kind)) is not None:
                if plainest is part:
                    continue
                rest.append(plainest)
            if is_valid(rest, self.sharding):
                yield replace(self, parts=_ordered(self.parts, rest))
        if self.recovery in (ATTEMPTS, EACH_EPOCH):
            yield replace(self, recovery=RETRY)
        if self.is_inside:
            yield replace(self, is_inside=False)
        if self.is_copied_seldom:
            yield replace(self, is_copied_seldom=False)

    def text(self, note: str) -> str:
        """The script, with ``note`` as its docstring."""
        return _Composition(self).text(note)


def draw_script(
    draw: random.Random,
    recovery: str = "",
    *,
    has_checkpoints: bool = False,
    sharding: str = WHOLE,
    with_open: bool = True,
) -> Script:
    """A valid combination of parts. ``with_open``: also those that are known not to be exact."""
    while True:
        parts = [draw.choice(_possible(kind, sharding, with_open)) for kind in REQUIRED.values()]
        for choices, weights in OPTIONAL.values():
            possible = _possible(choices, sharding, with_open)
            number = min(draw.choices(range(3), weights)[0], len(possible))
            parts += draw.sample(possible, number)
        # A script that is restarted reads the state before the loader has restored it.
        is_restarted = recovery == RESTART
        if is_restarted and not any("run.epochs" in part.gives for part in parts):
            continue
        if is_valid(parts, sharding):
            optional = [part for part in parts if part.kind not in REQUIRED]
            draw.shuffle(optional)  # the order of their lines
            parts = [part for part in parts if part.kind in REQUIRED] + optional
            chosen = recovery or draw.choice([RETRY, RETRY, RETRY, ATTEMPTS])
            returns = any("returns" in part.gives for part in parts)
            is_inside = not (sharding or returns) and draw.random() < 0.15
            can_be_each = not (sharding or is_inside) and _can_be_called_for_each_epoch(parts)
            if chosen == RETRY and can_be_each:
                chosen = draw.choice([RETRY, RETRY, EACH_EPOCH])
            is_copied_seldom = draw.random() < 0.3
            return Script(
                tuple(parts), chosen, has_checkpoints, sharding, is_inside, is_copied_seldom
            )


def _can_be_called_for_each_epoch(parts: Sequence[Part]) -> bool:
    """Whether the loop over epochs is not left early, and its beginnings draw no numbers: only
    run.epochs seeds those."""
    given = {name for part in parts for name in part.gives}
    starts = [line for part in parts for line in part.lines("epoch_start")]
    is_left = not given.isdisjoint({"leaves epochs", "returns"})
    needs_epochs = any("run.epochs" in part.needs for part in parts)
    has_epochs = DEFAULTS["epochs"] in parts and not needs_epochs
    return has_epochs and not is_left and not any("rand" in line for line in starts)


def _possible(parts: Sequence[Part], sharding: str, with_open: bool) -> list[Part]:
    possible = [part for part in parts if part.is_shardable or not sharding]
    return [part for part in possible if with_open or sharding not in part.open_in]


def is_valid(parts: Sequence[Part], sharding: str = WHOLE) -> bool:
    """Whether these parts can be combined in one script."""
    for part in parts:
        others = {name for other in parts if other is not part for name in _names(other)}
        others |= PROPERTIES[sharding]
        if not set(part.needs) <= others or set(part.excludes) & others:
            return False
    return True


def _names(part: Part) -> set[str]:
    return {part.label, part.kind, *part.gives}


def _ordered(parts: Sequence[Part], chosen: Sequence[Part]) -> tuple[Part, ...]:
    """``chosen`` in the order of ``parts``, those of the required kinds first."""
    known = {part.label: number for number, part in enumerate(parts)}
    kinds = list(REQUIRED)

    def place(part: Part) -> tuple[int, int]:
        if part.kind in kinds:
            return kinds.index(part.kind), 0
        return len(kinds), known[part.label]

    return tuple(sorted(chosen, key=place))


class _Composition:
    """The text of one script."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._sharding = script.sharding
        self._parts = script.parts
        self._by_kind = {**DEFAULTS, **{part.kind: part for part in script.parts}}

    def text(self, note: str) -> str:
        """The script, with ``note`` as its docstring."""
        blocks = [f'"""{note.strip()}\n"""\n\n{self._imports()}\n\n{DATA}']
        blocks += [text for part in self._parts if (text := "\n".join(part.lines("define")))]
        if self._sharding:
            blocks.append(SHARDED[self._sharding])
        blocks += [self._setup(), self._train(), self._end()]
        return "\n\n\n".join(block.strip("\n") for block in blocks) + "\n"

    def _imports(self) -> str:
        modules = set(self._all("imports"))
        if self._script.has_checkpoints or self._sharding:
            modules.add("import sys")
        if self._sharding == BUILD:
            modules.add("import os")
        if self._sharding:
            modules.add(_PARALLEL if self._sharding == MESH else _FSDP)
        plain = sorted(line for line in modules if line.startswith("import "))
        named = sorted(line for line in modules if line.startswith("from "))
        lines = [*plain, *IMPORTS.splitlines()[:-2], *named, "", "import elastic"]
        return "\n".join([*lines, SELDOM if self._script.is_copied_seldom else ""])

    def _all(self, place: str) -> list[str]:
        return [line for part in self._parts for line in part.lines(place)]

    # -- before training ----------------------------------------------------------------------

    @property
    def _has_inner_result(self) -> bool:
        """Whether results are read in the training function: only there the objects are known, or
        their shards can be gathered."""
        return self._script.has_inner_result

    def _setup(self) -> str:
        lines = self._join()
        if self._script.is_inside:
            return "\n".join(lines)
        if self._sharding == BUILD:
            tracked = [entry.split("=") for entry in self._tracked()]
            objects = "".join(f', "{name}": {value}' for name, value in tracked)
            built = [*self._built("mesh"), f'return {{"model": model{objects}}}']
            lines += ["", "", "def create(mesh):", *_indented(built), "", ""]
            return "\n".join([*lines, *self._late(), *self._all("loader")])
        return "\n".join([*lines, *self._registered()])

    def _registered(self) -> list[str]:
        """Everything that is created and registered outside of run.build."""
        tracked = self._tracked()
        if self._sharding:  # it is wrapped
            tracked = [entry for entry in tracked if entry != "ema=ema"]
        built = self._built(f'run.mesh["{self._dimension}"]')
        tracking = f"run.track({', '.join(tracked)})"
        return [*built, tracking, *self._late(), *self._all("loader")]

    @property
    def _dimension(self) -> str:
        return "tp" if self._sharding == MESH else "shard"

    def _join(self) -> list[str]:
        if self._sharding == BUILD:
            return [
                'os.environ["ELASTIC_NODE_MEMORY"] = sys.argv[2]',
                "run = elastic.join(",
                "    checkpoints=elastic.Checkpoints(sys.argv[1], when=1000, memory=2)",
                ")",
            ]
        arguments = []
        if self._sharding:
            arguments.append(f'mesh={{"{self._dimension}": int(sys.argv[3])}}')
        if self._script.has_checkpoints:
            arguments.append("checkpoints=sys.argv[1], when=2")
        return [f"run = elastic.join({', '.join(arguments)})"]

    def _built(self, mesh: str) -> list[str]:
        """Model, optimizer and what else is tracked."""
        model = self._by_kind["model"]
        lines = model.lines("build")
        if not self._sharding:
            lines += model.lines("wrap")
        else:
            lines = [*lines, f"sharded(network, {mesh})", *model.lines("sharded_wrap")]
            lines.append("model = " + self._wrapped("network"))
            if "ema=ema" in self._all("tracked"):
                other = "\n".join(model.lines("build")).replace("network", "ema").splitlines()
                lines += [*other, f"ema = sharded(ema, {mesh}).requires_grad_(False)"]
                lines += ["ema.load_state_dict(model.state_dict())"]
                lines += [] if self._sharding == BUILD else ["run.wrap(ema)"]
        if self._sharding == BUILD:
            lines.insert(0, "torch.manual_seed(1)")
        late = ("evaluation",)
        others = [part for part in self._parts if part.kind not in ("model", *late)]
        return lines + [line for part in others for line in part.lines("build")]

    def _late(self) -> list[str]:
        """What is not in ``create``."""
        return (
            [*self._by_kind["evaluation"].lines("build")] if "evaluation" in self._by_kind else []
        )

    def _wrapped(self, module: str) -> str:
        return module if self._sharding == BUILD else f"run.wrap({module})"

    def _tracked(self) -> list[str]:
        tracked = [line for part in self._parts for line in part.lines("tracked")]
        is_wrapped = "wrapper" in self._by_kind["optimizer"].gives
        return tracked if is_wrapped else ["optimizer=optimizer", *tracked]

    # -- training -----------------------------------------------------------------------------

    def _train(self) -> str:
        body = [*self._all("step_start"), *self._filled(self._by_kind["update"])]
        body += self._all("step_end")
        steps = _with_body(self._by_kind["loop"].lines("head"), "BODY", body)
        epoch = [*self._all("epoch_start"), *steps, *self._all_filled("epoch_end")]
        name = "train()"
        epochs = _with_body(self._by_kind["epochs"].lines("outer"), "EPOCH", epoch)
        if self._script.recovery == EACH_EPOCH:
            name = "train(epoch)"
            epochs = ['if run.state.setdefault("epoch", 0) > epoch:', "    return", *epoch]
            epochs += ['run.state["epoch"] = epoch + 1']
        body = [*self._unpacked(), *self._all("train_start"), *epochs]
        if self._script.is_inside:
            body = [*self._registered(), *body]
        if self._has_inner_result:
            body += [f"result.update({self._result()})"]
        return "\n".join([f"def {name}:", *_indented(body)])

    def _unpacked(self) -> list[str]:
        if self._sharding != BUILD:
            return []
        lines = ["objects = run.build(create)", 'model = network = objects["model"]']
        for name, _, value in (entry.partition("=") for entry in self._tracked()):
            lines.append(f'{value} = objects["{name}"]')
        return lines

    def _all_filled(self, place: str) -> list[str]:
        return [line for line in self._all(place) for line in self._fill(line)]

    def _filled(self, update: Part) -> list[str]:
        return [line for written in update.lines("body") for line in self._fill(written)]

    def _fill(self, line: str) -> list[str]:
        """The lines that a word in capitals stands for."""
        places = {"LOSS": "loss", "GRADIENTS": "gradients", "STEP": "step", "AFTER": "after_update"}
        word = line.strip()
        if word not in places:
            return [line]
        margin = line[: len(line) - len(line.lstrip())]
        return [f"{margin}{filled}" if filled else "" for filled in self._all(places[word])]

    def _end(self) -> str:
        call = {
            RETRY: "run.retry(train)",
            ATTEMPTS: "for attempt in run.attempts():\n    with attempt:\n        train()",
            EACH_EPOCH: "for epoch in range(EPOCHS):\n    run.retry(train, epoch, is_last=False)",
            RESTART: "train()",
        }[self._script.recovery]
        if self._has_inner_result:
            return f"result = {{}}\n{call}"
        return f"{call}\nresult = {self._result()}"

    def _result(self) -> str:
        entries = [
            '**leaves("model", network.state_dict())',
            '**leaves("optimizer", optimizer.state_dict())',
            *(line.strip().rstrip(",") for line in self._all("result")),
        ]
        margin = "    " if self._has_inner_result else ""
        rows = "".join(f"{margin}    {entry},\n" for entry in entries)
        return f"{{\n{rows}{margin}}}"


def _with_body(lines: Sequence[str], word: str, body: Sequence[str]) -> list[str]:
    """``lines`` of a loop, with ``body`` instead of ``word``."""
    filled: list[str] = []
    for line in lines:
        margin = line[: len(line) - len(line.lstrip())]
        filled += [indent(each, margin) for each in body] if line.strip() == word else [line]
    return filled


def _indented(lines: Sequence[str]) -> list[str]:
    return [indent(line, "    ") if "\n" not in line else f"    {line}" for line in lines]
