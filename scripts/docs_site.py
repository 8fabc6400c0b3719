"""mkdocs hooks (see ``mkdocs.yml``): what the site holds beyond the pages in ``docs/``.

- ``README.md`` is the home page, and every file of the repository that a page links to becomes a
  page, so that a link works on the site as it does in a checkout. Links to files that do not exist
  are left as they are: ``mkdocs build --strict`` refuses them.
- ``<!-- reference: MODULE, NAME, … -->`` in a page stands for one entry per public name of that
  module, these names first.
- A public name without a docstring, or without an entry in the built site, fails the strict build.
"""

from __future__ import annotations

import ast
import logging
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HOME = ROOT / "README.md"
PROJECT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml"}
# Where a page says `<!-- reference: MODULE -->`, and the modules whose names are public.
PUBLIC_MODULES = (
    "elastic",
    "elastic.errors",
    "elastic.testing.cluster",
    "elastic.testing.faults",
    "elastic.testing.journal",
    "elastic.testing.ledger",
    "elastic.testing.node",
    "elastic.testing.pacing",
    "elastic.testing.processes",
    "elastic.testing.slowness",
    "elastic.testing.waiting",
    "checkpoints",
    "checkpoints.testing",
    "checkpoints.testing",
)

# Sources would bury the pages that explain them among the results of a search.
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n"

_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_REFERENCE = re.compile(r"<!-- reference: ([\w.]+)((?:,\s+\w+)*)\s+-->")
_log = logging.getLogger("mkdocs.hooks.docs_site")  # a warning fails a strict build
_origins: dict[str, Path] = {}  # page on the site -> file in the repository


# Files of the repository as pages ----------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the home page, and every file that is linked to from a page."""
    _origins.clear()
    for file in files.documentation_pages():
        _origins[file.src_uri] = DOCS / file.src_uri
    pending = [*_origins.values(), HOME, *(ROOT / name for name in PROJECT_PAGES)]
    seen: set[Path] = set()
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        if not path.is_relative_to(DOCS):
            files.append(_as_page(path, config))
            _origins[site_uri(path)] = path
        if path.suffix == ".md":
            pending += targets(path)
    return files


def _as_page(path: Path, config: MkDocsConfig) -> File:
    if path.suffix == ".md":
        return File.generated(config, site_uri(path), content=path.read_text())
    name = path.relative_to(ROOT)
    if path.is_dir():
        entries = sorted(entry.name for entry in path.iterdir() if entry.name[0] not in "._")
        content = f"# {name}/\n\n" + "".join(f"- `{entry}`\n" for entry in entries)
    else:
        language = LANGUAGES.get(path.suffix, "text")
        content = f"# {name}\n\n````{language}\n{path.read_text()}\n````\n"
    return File.generated(config, site_uri(path), content=NOT_SEARCHED + content)


def site_uri(path: Path) -> str:
    """Where a file of the repository is on the site, relative to its root."""
    if path == HOME:
        return "index.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return name if path.suffix == ".md" else f"source/{name}.md"


def targets(page: Path) -> Iterator[Path]:
    """The files of the repository that a page links to."""
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        target = _target(page, link)
        if target is not None and (target.is_dir() or not target.is_relative_to(DOCS)):
            yield target


def _target(page: Path, link: str) -> Path | None:
    """None: an address, an anchor of the same page, or a file that does not exist."""
    name = link.partition("#")[0]
    if not name or ":" in name or name.startswith("/"):
        return None
    path = Path(os.path.normpath(page.parent / name))
    if not path.is_relative_to(ROOT) or not path.exists():
        return None
    readme = path / "README.md"
    return readme if readme.is_file() else path


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are on the site, and one entry for each public name."""
    here = page.file.src_uri
    origin = _origins[here]
    if origin.suffix != ".md":
        return markdown

    def relative(match: re.Match[str]) -> str:
        target = _target(origin, match[1])
        if target is None:
            return match[1]
        _, mark, anchor = match[1].partition("#")
        return posixpath.relpath(site_uri(target), posixpath.dirname(here) or ".") + mark + anchor

    parts, at = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(relative, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    parts.append(_LINK.sub(relative, markdown[at:]))
    return _REFERENCE.sub(
        lambda match: _entries(match[1], match[2].replace(",", " ").split()), "".join(parts)
    )


# The reference -----------------------------------------------------------------------------------


def _entries(module: str, first: list[str]) -> str:
    names = [name for name in public_names(module) if name not in first]
    return "\n\n".join(f"::: {module}.{name}" for name in (*first, *names))


def public_names(module: str) -> list[str]:
    """``__all__`` of a module, or what it defines without an underscore. Imports nothing."""
    path = ROOT / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(source.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    defined = (ast.ClassDef, ast.FunctionDef)
    return [n.name for n in tree.body if isinstance(n, defined) and not n.name.startswith("_")]


def undocumented() -> Iterator[str]:
    """Public names, and public methods and properties of theirs, without a docstring.

    What implements a public protocol is documented there.
    """
    packages: dict[str, griffe.Object | griffe.Alias] = {}
    public: dict[str, griffe.Object] = {}
    for module in PUBLIC_MODULES:
        package = module.partition(".")[0]
        if package not in packages:
            packages[package] = griffe.load(
                package, search_paths=[ROOT], resolve_aliases=True, resolve_implicit=True
            )
        for name in public_names(module):
            found = packages[package][f"{module}.{name}".partition(".")[2]]
            public[f"{module}.{name}"] = (
                found.final_target if isinstance(found, griffe.Alias) else found
            )
    protocols = [found for found in public.values() if _is_protocol(found)]
    promised = {name for protocol in protocols for name in protocol.members}
    for name, found in public.items():
        yield from _undocumented_in(name, found, set() if found in protocols else promised)


def _is_protocol(found: griffe.Object) -> bool:
    return found.is_class and any(str(base) == "Protocol" for base in found.bases)


def _undocumented_in(name: str, target: griffe.Object, promised: set[str]) -> Iterator[str]:
    # A type alias or a constant: its entry shows the value.
    if not target.has_docstring and (target.is_class or target.is_function):
        yield name
    if target.is_class:
        for member in target.members.values():
            is_own = not member.is_alias and not member.name.startswith("_")
            is_called = member.is_function or "property" in member.labels
            inherited = any(member.name in base.members for base in target.mro())
            is_documented = member.has_docstring or inherited or member.name in promised
            if is_own and is_called and not is_documented:
                yield f"{name}.{member.name}"


def on_post_build(config: MkDocsConfig) -> None:
    """Every public name has a docstring and an entry. Warnings, which a strict build refuses."""
    for name in undocumented():
        _log.warning("%s is public and has no docstring", name)
    reference = Path(config.site_dir) / "reference"
    built = "".join(page.read_text() for page in sorted(reference.rglob("*.html")))
    for module in PUBLIC_MODULES:
        for name in public_names(module):
            if f'id="{module}.{name}"' not in built:
                _log.warning("%s.%s is public and has no entry in docs/reference/", module, name)
