"""The files that docstrings, comments and pages name exist."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
NAMED = re.compile(r"(?<![\w./*-])((?:[\w.]+/)*\w+\.py)\b")
OF_OTHERS = re.compile(
    r"^(torch/|launcher/api|elastic/(agent/server|multiprocessing)/)|^(dynamic_rendezvous|rendezvous/dynamic_rendezvous|distributed_c10d|rendezvous|train|my_\w+|setup|job"
    r"|elastic|checkpoints|script|main|your_\w+|inference|evaluate|pretrain|finetune|test_x|a|b|t)\.py$"
)


def texts() -> list[Path]:
    return [
        path
        for pattern in ("elastic/**/*.py", "checkpoints/**/*.py", "docs/**/*.md", "*.md")
        for path in REPOSITORY.glob(pattern)
        if path.name != "CHANGELOG.md"
    ]


def is_there(name: str, by_name: dict[str, list[str]]) -> bool:
    known = by_name.get(name.rsplit("/", 1)[-1], [])
    return any(f"/{path}".endswith(f"/{name.lstrip('./')}") for path in known)


def test_every_named_file_exists() -> None:
    by_name: dict[str, list[str]] = {}
    for root in ("elastic", "checkpoints", "tests", "examples", "benchmarks", "scripts"):
        for path in (REPOSITORY / root).rglob("*.py"):
            by_name.setdefault(path.name, []).append(str(path.relative_to(REPOSITORY)))
    missing = [
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path in texts()
        for name in NAMED.findall(path.read_text(encoding="utf-8"))
        if not OF_OTHERS.search(name) and not is_there(name, by_name)
    ]
    assert not missing, "\n".join(missing)
