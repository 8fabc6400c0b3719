"""Our own tensors do not depend on the script's ``torch.set_default_device``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from torch.utils._device import _device_constructors

ROOT = Path(__file__).parents[3]
CONSTRUCTORS = {function.__name__ for function in _device_constructors()}
CALL = re.compile(rf"\btorch\.({'|'.join(CONSTRUCTORS)})\(")
# Scripts, which may use their default device, and code that runs only in tests.
EXEMPT = ("elastic/cli/scripts/", "elastic/testing/", "checkpoints/testing/")


def unplaced(path: Path) -> Iterator[str]:
    """Calls of torch's constructors without a device."""
    text = path.read_text()
    if not CALL.search(text):  # most files: parsing all of them takes seconds
        return
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "torch"
            and node.func.attr in CONSTRUCTORS
            and "device" not in {keyword.arg for keyword in node.keywords}
        ):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: torch.{node.func.attr}()"


def test_every_tensor_of_ours_names_its_device() -> None:
    paths = [*ROOT.glob("elastic/**/*.py"), *ROOT.glob("checkpoints/**/*.py")]
    ours = [p for p in paths if not p.relative_to(ROOT).as_posix().startswith(EXEMPT)]
    found = [call for path in ours for call in unplaced(path)]
    assert not found, "\n".join(["add device=: it may be a GPU of the script's choice", *found])
    assert len(ours) > 100


def test_a_missing_device_is_found() -> None:
    path = ROOT / "elastic" / "testing" / "small_world" / "worker.py"
    assert any("torch.as_tensor()" in call for call in unplaced(path))
