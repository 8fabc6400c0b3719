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
        return {name: value} if torch.is_tensor(value) or type(value) in (int, float) else {}
    return {k: v for key, item in items for k, v in leaves(f"{name}.{key}", item).items()}
"""
RETRY, ATTEMPTS, RESTART = "run.retry", "run.attempts", "restart"


@dataclass(frozen=True)
class Script:
    """A combination of parts. Its text is determined by it."""

    parts: tuple[Part, ...]
    recovery: str = RETRY  # or ATTEMPTS, or RESTART: neither
    has_checkpoints: bool = False  # in the folder that is its first argument

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(part.label for part in self.parts)

    @property
    def added(self) -> tuple[str, ...]:
        """The parts that are not those of the plainest script."""
        plainest = {part.label for part in DEFAULTS.values()}
        return tuple(label for label in self.labels if label not in plainest)

    @property
    def draws_by_rank(self) -> bool:
        """Whether its result depends on the number of ranks."""
        return any(part.draws_by_rank for part in self.parts)

    def smaller(self) -> Iterable[Script]:
        """The valid scripts with one part less, or with one of the plainest instead."""
        for part in self.parts:
            rest = [other for other in self.parts if other is not part]
            if (plainest := DEFAULTS.get(part.kind)) is not None:
                if plainest is part:
                    continue
                rest.append(plainest)
            if is_valid(rest):
                yield replace(self, parts=_ordered(self.parts, rest))
        if self.recovery == ATTEMPTS:
            yield replace(self, recovery=RETRY)

    def text(self, note: str) -> str:
        """The script, with ``note`` as its docstring."""
        return _Composition(self).text(note)


def draw_script(
    draw: random.Random, recovery: str = "", *, has_checkpoints: bool = False
) -> Script:
    """A valid combination of parts."""
    while True:
        parts = [draw.choice(kind) for kind in REQUIRED.values()]
        for choices, weights in OPTIONAL.values():
            number = draw.choices(range(3), weights)[0]
            parts += draw.sample(choices, number)
        if is_valid(parts):
            optional = [part for part in parts if part.kind not in REQUIRED]
            draw.shuffle(optional)  # the order of their lines
            parts = [part for part in parts if part.kind in REQUIRED] + optional
            chosen = recovery or draw.choice([RETRY, RETRY, RETRY, ATTEMPTS])
            return Script(tuple(parts), chosen, has_checkpoints)


def is_valid(parts: Sequence[Part]) -> bool:
    """Whether these parts can be combined in one script."""
    for part in parts:
        others = {name for other in parts if other is not part for name in _names(other)}
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
        self._parts = script.parts
        self._by_kind = {part.kind: part for part in script.parts}

    def text(self, note: str) -> str:
        kinds = {part.kind for part in self._parts}
        modules = [
            *(["import sys"] if self._script.has_checkpoints else []),
            *sorted(dict.fromkeys(self._all("imports"))),
        ]
        head = f'"""{note.strip()}\n"""\n\n'
        plain = [line for line in modules if line.startswith("import ")]
        named = [line for line in modules if line.startswith("from ")]
        head += "\n".join([*plain, IMPORTS.rstrip(), *named]) + "\n\n" + DATA + "\n"
        definitions = [lines for part in self._parts if (lines := part.lines("define"))]
        blocks = [head, *("\n".join(lines) for lines in definitions), self._setup()]
        assert {"model", "optimizer", "update", "data"} <= kinds
        blocks.append(self._train())
        blocks.append(self._end())
        return "\n\n\n".join(block.strip("\n") for block in blocks) + "\n"

    def _all(self, place: str) -> list[str]:
        return [line for part in self._parts for line in part.lines(place)]

    def _setup(self) -> str:
        join = "run = elastic.join()"
        if self._script.has_checkpoints:
            join = "run = elastic.join(checkpoints=sys.argv[1], when=2)"
        tracked = ["optimizer=optimizer"] if "noam" not in self._tracked() else []
        tracked += [line for part in self._parts for line in part.lines("tracked")]
        lines = [join, *self._all("build"), f"run.track({', '.join(tracked)})"]
        return "\n".join([*lines, *self._all("loader")])

    def _tracked(self) -> str:
        return " ".join(self._all("tracked"))

    def _train(self) -> str:
        steps = ["for i, (inputs, targets) in enumerate(loader, start=loader.index):"]
        steps += _indented([*self._all("step_start"), *self._filled(self._by_kind["update"])])
        epochs = ["for epoch in run.epochs(EPOCHS):"]
        epochs += _indented([*self._all("epoch_start"), *steps, *self._all_filled("epoch_end")])
        return "\n".join(["def train():", *_indented([*self._all("train_start"), *epochs])])

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
            RESTART: "train()",
        }[self._script.recovery]
        entries = ["**leaves('model', network.state_dict())"]
        entries += ["**leaves('optimizer', optimizer.state_dict())"]
        entries += self._entries()
        rows = "".join(f"    {entry.replace(chr(39), chr(34))},\n" for entry in entries)
        return f"{call}\nresult = {{\n{rows}}}"

    def _entries(self) -> list[str]:
        return [line.strip().rstrip(",") for line in self._all("result")]


def _indented(lines: Sequence[str]) -> list[str]:
    return [indent(line, "    ") for line in lines]
