"""The labelled corpus of real error texts, with the script that judges them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def load_script() -> ModuleType:
    path = REPOSITORY / "scripts" / "failure_rules.py"
    spec = importlib.util.spec_from_file_location("failure_rules", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()
CORPUS: list[dict[str, Any]] = SCRIPT.corpus()


def name_of(example: dict[str, Any]) -> str:
    lines: list[str] = example.get("kernel_log", [])
    return str((*lines, example["text"] or example["source"])[0][:60])
