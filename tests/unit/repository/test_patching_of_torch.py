"""Only one file patches torch."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PATCHES = "elastic/groups/pending.py"
# The other files that change objects of torch, and their relation to process groups.
ELSEWHERE = {
    "elastic/torch_private.py",  # the accessors that pending.py uses; a loader's iterator
    "elastic/launcher/torch_agent.py",  # torchrun's agent, not the process group
}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def sources(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            yield str(path.relative_to(REPOSITORY)), parsed(path)


def changes_of_torch(tree: ast.Module) -> list[str]:
    """Assignments to attributes of objects that a module imports from torch."""
    of_torch: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            of_torch |= {a.asname or "torch" for a in node.names if a.name.startswith("torch")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            of_torch |= {a.asname or a.name for a in node.names}
    found: list[str] = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.Delete):
            targets = node.targets if isinstance(node, ast.Delete) else [node.target]
        elif isinstance(node, ast.Call) and (
            isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr")
        ):
            targets = [ast.Attribute(value=node.args[0], attr="?")]
        for target in targets:
            root = target
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if isinstance(target, ast.Attribute | ast.Subscript) and (
                isinstance(root, ast.Name) and root.id in of_torch
            ):
                found.append(ast.unparse(target))
    return found


def test_torch_is_patched_in_one_file() -> None:
    found = {
        path: changes
        for path, tree in sources("elastic", "checkpoints")
        if path not in ELSEWHERE and (changes := changes_of_torch(tree))
    }
    assert found == {PATCHES: ["dist.Work.wait", "dist.Work.wait"]}


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed as dist\ndist.Work.wait = None",
        "from torch.distributed import distributed_c10d as c\nc._world.group_count = 0",
        "from torch.utils.data import dataloader\nsetattr(dataloader, 'x', 1)",
        "import torch\ntorch.backends.flags['x'] = 1",
    ],
)
def test_the_scan_finds_changes(code: str) -> None:
    assert changes_of_torch(ast.parse(code))
    assert not changes_of_torch(ast.parse("import torch\nx = object()\nx.wait = torch.ones(1)"))
