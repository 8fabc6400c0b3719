"""The names of the API, the command line, the options and the files that a text mentions."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import checkpoints
import elastic
from elastic.cli.completion import complete_parser
from elastic.tuning.options import OTHER_VARIABLES, AgentOptions

REPOSITORY = Path(__file__).parents[3]
PACKAGES = {"elastic": elastic, "checkpoints": checkpoints}
PUBLIC = {name: getattr(p, name) for p in (checkpoints, elastic) for name in p.__all__}
# What texts and examples call an object of ours.
OBJECTS: dict[str, tuple[type, ...]] = {
    "run": (elastic.Run,),
    "step": (elastic.Step,),
    "loader": (elastic.ElasticLoader,),
    "engine": (checkpoints.Engine,),
}
# Of other programs that texts name: kubectl, and the script in an example.
FOREIGN_FLAGS = {
    "--from-env-file",
    "--replicas",
    "--lr",
    "--shm-size",
    "--ulimit",
    "--gpu-reset",
    "--prefix",
    "--quota-backend-bytes",
}
# Of other products, and of the kit for tests.
FOREIGN_VARIABLES = {"ELASTIC_PASSWORD", "ELASTIC_TEST_TOKEN"}

# Keys in files, with a dot of their own.
FILE_KEYS = {"checkpoints.tree"}

_ROOT = "|".join((*PACKAGES, *OBJECTS))
_DOTTED = re.compile(rf"(?<![\w./:@$-])({_ROOT})((?:\.[A-Za-z_]\w*)+)(?!\w*[/:-])")
_CALL = re.compile(rf"(?<![\w.])((?:(?:{_ROOT})\.)?\w+)\(([^()]*)\)")
_KEYWORD = re.compile(r"(?<![\w.=!<>])(\w+)=(?!=)")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*")
_COMMAND = re.compile(r"[`|] ?elastic (.*?)[`|;>#]")
_VARIABLE = re.compile(r"(?<!\w)ELASTIC_[A-Z0-9_]*[A-Z0-9](?![A-Z0-9_*…])")
_FILE = re.compile(
    r"(?<![\w./{-])(?:tests|docs|scripts|benchmarks|examples|deploy|elastic|checkpoints)"
    r"/[\w./*{},-]*\w+(?:\.(?:py|md|json|yaml|sh|env))"
)
_TEST = re.compile(r"(?<![\w/])test_\w+(?![\w.*/])")


@dataclass(frozen=True)
class Text:
    """A text that a person reads, and its location."""

    place: str
    text: str


# Where texts come from ---------------------------------------------------------------------------


def messages() -> Iterator[Text]:
    """Every string in the sources that is no docstring: what is raised, logged or printed."""
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            if "scripts" not in path.parts:
                yield from strings_of(path.read_text(), str(path.relative_to(REPOSITORY)))


def strings_of(source: str, name: str) -> Iterator[Text]:
    """The strings of one source file, without docstrings; ``…`` for what is put in."""
    tree = ast.parse(source)
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in ast.walk(node)}
            parts = [p.value if isinstance(p, ast.Constant) else "…" for p in node.values]
            yield Text(f"{name}:{node.lineno}", "".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Text(f"{name}:{node.lineno}", node.value)


def pages() -> Iterator[Text]:
    """Code in the pages: fenced blocks, line by line, and inline."""
    found = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    for folder in ("docs", "deploy", "examples"):
        found += sorted((REPOSITORY / folder).rglob("*.md"))
    for path in found:
        name = str(path.relative_to(REPOSITORY))
        yield from codes_of(path.read_text(), name)


def codes_of(page: str, name: str) -> Iterator[Text]:
    """The code of one page; output in ``text`` blocks and removed lines of a diff are left out."""
    blocks = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for kind, block in blocks.findall(page):
        if kind in ("text", "mermaid", "dockerfile"):
            continue
        joined = block.replace("\\\n", " ")
        if kind == "diff":
            joined = "\n".join(li.lstrip("+ ") for li in block.splitlines() if li[:1] != "-")
        yield from (Text(name, line) for line in joined.splitlines())
    for code in re.findall(r"`([^`]+)`", blocks.sub("", page)):
        yield Text(name, " ".join(code.split()))


# What does not exist -----------------------------------------------------------------------------


def unknown_names(text: str) -> Iterator[str]:
    """``elastic.x``, ``checkpoints.x``, ``run.x``, … that cannot be resolved."""
    for root, dotted in _DOTTED.findall(text):
        path = dotted[1:].split(".")
        if path[-1] in ("py", "md", "json", "log", "whl"):
            continue
        if root in OBJECTS:
            if not any(_is_attribute(cls, path[0]) for cls in OBJECTS[root]):
                yield f"{root}.{path[0]}"
            elif path[0] == "world" and not all(_is_attribute(elastic.World, p) for p in path[1:]):
                yield f"{root}{dotted}"
        elif f"{root}{dotted}" not in FILE_KEYS and not _resolves(root, path):
            yield f"{root}{dotted}"


def _resolves(root: str, path: list[str]) -> bool:
    found: Any = PACKAGES[root]
    name = root
    for part in path:
        name = f"{name}.{part}"
        if inspect.isclass(found):
            return _is_attribute(found, part)
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(name)
        except ImportError:
            return False
    return True


def _is_attribute(cls: type, name: str) -> bool:
    """Of the class, a field of a dataclass, or set by a method."""
    return (
        hasattr(cls, name)
        or any(name in inspect.get_annotations(c) for c in cls.__mro__)
        or f"self.{name} = " in inspect.getsource(cls)
    )


def unknown_keywords(text: str) -> Iterator[str]:
    """Arguments of public functions and classes that these do not take."""
    for name, arguments in _CALL.findall(text):
        taken = [inspect.signature(function).parameters for function in _callables(name)]
        if not taken or any(p.kind is p.VAR_KEYWORD for ps in taken for p in ps.values()):
            continue
        for keyword in _KEYWORD.findall(arguments):
            if not any(keyword in parameters for parameters in taken):
                yield f"{name}({keyword}=)"


def _callables(name: str) -> list[Callable[..., Any]]:
    root, _, last = name.rpartition(".")
    if root in OBJECTS:
        found = [getattr(cls, last, None) for cls in OBJECTS[root]]
    else:
        found = [getattr(PACKAGES[root], last, None) if root else PUBLIC.get(name)]
    return [function for function in found if callable(function)]


def unknown_flags(text: str) -> Iterator[str]:
    """Flags in sentences that neither torchrun nor a command of ours has."""
    if " " not in text:
        return  # part of a command line of etcd's
    text = re.sub(r"\S+\.py .*", "", text)  # a script's own flags follow its name
    yield from (flag for flag in _FLAG.findall(text) if flag not in _all_flags())


def unknown_commands(text: str) -> Iterator[str]:
    """`elastic COMMAND` in backticks: its name, and its flags."""
    for line in _COMMAND.findall(text):
        parser, words = whole(), line.split()
        while words and (below := _commands_of(parser)) and words[0].islower():
            word = words.pop(0).rstrip(",.:")
            if not word.isidentifier():
                break
            if word not in below:
                yield f"elastic {line}: {word}"
                break
            parser = below[word]
        if parser.prog.endswith((" run", " render")):
            stop = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
            words = words[:stop]  # the script's own flags follow
        known = _flags_of(parser)
        for word in words:
            if (flag := _FLAG.match(word)) and flag[0] not in known:
                yield f"elastic {line}: {flag[0]}"


def unknown_command_lines(text: str) -> Iterator[str]:
    """The same in a text that is code as a whole."""
    yield from unknown_commands(f"`{text}`")


def unknown_variables(text: str) -> Iterator[str]:
    """``ELASTIC_*`` variables that nobody reads."""
    options = {field.name.upper() for field in fields(AgentOptions)}
    for variable in _VARIABLE.findall(text):
        known = variable.removeprefix("ELASTIC_") in options | OTHER_VARIABLES
        if not known and variable not in FOREIGN_VARIABLES:
            yield variable


def unknown_files(text: str) -> Iterator[str]:
    """Files of the repository, and tests by name."""
    for file in _FILE.findall(text):
        pattern = file.replace("{", "[").replace("}", "]")
        if not any(REPOSITORY.glob(pattern)):
            yield file
    for name in _TEST.findall(text):
        if name not in _tests():
            yield name


@cache
def whole() -> argparse.ArgumentParser:
    """The parser of all commands."""
    return complete_parser()


@cache
def _all_flags() -> set[str]:
    return FOREIGN_FLAGS | _flags_of(whole())


@cache
def _tests() -> set[str]:
    names: set[str] = set()
    for path in (REPOSITORY / "tests").rglob("*.py"):
        names |= {path.stem, *re.findall(r"def (test_\w+)", path.read_text())}
    return names


def _commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _flags_of(parser: argparse.ArgumentParser) -> set[str]:
    own = {flag for action in parser._actions for flag in action.option_strings}
    return own.union(*(_flags_of(below) for below in _commands_of(parser).values()))
