"""Public class names are unique within the project."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_a_public_class_name_is_defined_once() -> None:
    places = defaultdict[str, list[str]](list)
    for package in ("elastic", "checkpoints"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(f"{path.relative_to(REPOSITORY)}:{node.lineno}")
    assert len(places) > 300, "the scan found too few classes"
    repeated = {name: where for name, where in places.items() if len(where) > 1}
    assert not repeated, repeated
