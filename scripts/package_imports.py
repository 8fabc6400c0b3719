"""Write the packages and their imports into docs/architecture.md, between its two markers.

python scripts/package_imports.py          # rewrite that part of the page

Imports of a package are those of its files and subpackages, in functions, too. An arrow that
follows from others is omitted from the picture (transitive reduction); every import is in the
table.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- packages: written by scripts/package_imports.py -->"
END = "<!-- end of packages -->"

Imports = dict[str, set[str]]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules() -> dict[str, Path]:
    """Every module of both distributions' packages, by its name."""
    return {
        module_name(path): path
        for package in ("elastic", "checkpoints")
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def imported_by(tree: ast.Module, known: dict[str, Path]) -> set[str]:
    """The known modules that a module imports, here or in a function, the deepest name of each."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module or "")
    return found


@functools.cache  # a second of CPU time
def file_imports() -> Imports:
    """Which file imports which."""
    known = modules()
    return {
        name: imported_by(ast.parse(path.read_text(encoding="utf-8")), known) - {name}
        for name, path in known.items()
    }


def package_of(module: str) -> str:
    """``elastic.agent`` for all in it; files at the top of ``elastic`` are its basics."""
    parts = module.split(".")
    if parts[0] == "checkpoints":
        return "checkpoints"
    if (ROOT / "elastic" / (parts[1] if len(parts) > 1 else "")).is_dir() and len(parts) > 1:
        return parts[1]
    return "basics"


def package_imports(files: Imports) -> Imports:
    found: Imports = defaultdict(set)
    for module, targets in files.items():
        if module == "elastic":  # the lazy public face imports nothing when it is imported
            continue
        found[package_of(module)] |= {package_of(target) for target in targets}
    return {package: targets - {package} for package, targets in found.items()}


def reachable(package: str, imports: Imports) -> set[str]:
    found: set[str] = set()
    waiting = list(imports.get(package, ()))
    while waiting:
        if (one := waiting.pop()) not in found:
            found.add(one)
            waiting.extend(imports.get(one, ()))
    return found


def reduced(imports: Imports) -> Imports:
    """Without the imports that follow from others: what a picture needs."""
    return {
        package: {
            target
            for target in targets
            if not any(target in reachable(other, imports) for other in targets - {target})
        }
        for package, targets in imports.items()
    }


def purpose(package: str) -> str:
    """The first paragraph of a package's docstring."""
    if package == "basics":
        return "Error tree, events, options, and time as an argument."
    path = ROOT / ("checkpoints" if package == "checkpoints" else f"elastic/{package}")
    text = ast.get_docstring(ast.parse((path / "__init__.py").read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def picture(imports: Imports) -> list[str]:
    arrows = reduced({p: t - {"basics"} for p, t in imports.items() if p != "basics"})
    return [
        "```mermaid",
        "flowchart TB",
        *(f"  {p} --> {t}" for p in sorted(arrows) for t in sorted(arrows[p])),
        "```",
    ]


def table(imports: Imports) -> list[str]:
    rows = [
        f"| `{'' if p in ('checkpoints', 'basics') else 'elastic/'}{p}"
        f"{'' if p == 'basics' else '/'}` | {purpose(p)} | {', '.join(sorted(imports[p])) or '–'} |"
        for p in sorted(imports)
    ]
    return ["| package | purpose | imports |", "|---|---|---|", *rows]


def section() -> str:
    imports = package_imports(file_imports())
    return "\n".join([BEGIN, "", *picture(imports), "", *table(imports), "", END])


def written(page: str) -> str:
    """``page`` with the part between its markers as it should be."""
    before, rest = page.split(BEGIN)
    return before + section() + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
