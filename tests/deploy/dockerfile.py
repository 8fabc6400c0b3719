"""Reads deploy/Dockerfile: stages and their instructions."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    """``FROM base AS name`` and what follows."""

    base: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [text for name, text in self.instructions if name == instruction]


class Dockerfile:
    """The stages by name, in order."""

    def __init__(self, path: Path) -> None:
        self.stages: dict[str, Stage] = {}
        stage: Stage | None = None
        for name, text in _instructions(path.read_text()):
            if name == "FROM":
                match = re.fullmatch(r"(\S+) AS (\S+)", text)
                assert match, f"a stage without a name: FROM {text}"
                stage = self.stages[match[2]] = Stage(match[1], match[2])
            else:
                assert stage, f"{name} before FROM"
                stage.instructions.append((name, text))

    def lineage(self, name: str) -> list[Stage]:
        """The stage and its base stages, the first one first."""
        stage = self.stages.get(name)
        return [] if stage is None else [*self.lineage(stage.base), stage]

    def effective(self, name: str, instruction: str) -> str:
        """The effective value in an image of this stage: the last one applies."""
        return [text for stage in self.lineage(name) for text in stage.all(instruction)][-1]

    def entrypoint(self, name: str) -> list[str]:
        """Raises ValueError for the shell form."""
        words = json.loads(self.effective(name, "ENTRYPOINT"))
        assert isinstance(words, list)
        return words

    def environment(self, name: str) -> dict[str, str]:
        pairs = [
            pair.partition("=")
            for stage in self.lineage(name)
            for text in stage.all("ENV")
            for pair in text.split()
        ]
        return {key: value for key, _, value in pairs}


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    split = (line.split(maxsplit=1) for line in joined.splitlines() if line.strip())
    return [(name, rest) for name, rest in split]
