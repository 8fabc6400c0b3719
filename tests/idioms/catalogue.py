"""The catalogue of idioms: one small script each, working ones in ``scripts``, refused ones in
``refused``.

A script's docstring is its entry in the documentation. Its first line is the title. Lines that
begin with one of these words are directives, and not part of the text:

- ``Group: …``: its heading in docs/idioms.md
- ``Tolerance: 0.02, because …``: how far weights may differ from those of one worker (default 1e-6)
- ``Inexact: loss to 0.1, because …``: the tolerance of one entry of the script's result
- ``Compared: among ranks only, because …``: ranks are compared with each other, not with one worker
- ``Refused: …``: a part of the error message with which the script ends
- ``Workers: 3``: how many workers are needed to raise that error (default 1)
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS, REFUSED = HERE / "scripts", HERE / "refused"
TOLERANCE = 1e-6
PAGE = HERE.parent.parent / "docs" / "idioms.md"
GROUPS = (
    "The loop",
    "Gradients",
    "Optimizers and learning rates",
    "Precision and compilation",
    "Models",
    "Averages and state",
    "Data",
    "Evaluation and logging",
)
_DIRECTIVES = ("Group", "Inexact", "Tolerance", "Compared", "Refused", "Workers")


@dataclass(frozen=True, kw_only=True)
class Idiom:
    """A script and its parsed docstring."""

    path: Path
    title: str
    text: str  # paragraphs of Markdown
    directives: dict[str, str]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def tolerance(self) -> float:
        """Absolute and relative tolerance of the final weights."""
        said = self.directives.get("Tolerance")
        return float(said.split(",")[0]) if said else TOLERANCE

    def tolerance_of(self, entry: str) -> float:
        """The tolerance of one entry of the result."""
        name, _, rest = self.directives.get("Inexact", "").partition(" to ")
        return float(rest.split(",")[0]) if name == entry else self.tolerance

    @property
    def is_compared_alone(self) -> bool:
        """Whether results are also compared with those of one worker, not only among ranks."""
        return "Compared" not in self.directives

    @property
    def refusal(self) -> str:
        """A part of the error message, or "" if the idiom works."""
        return self.directives.get("Refused", "")

    @property
    def workers(self) -> int:
        """How many workers are needed to raise the error."""
        return int(self.directives.get("Workers", "1"))


def idioms(folder: Path = SCRIPTS) -> list[Idiom]:
    """All idioms of a folder, by name. Raises ValueError for a script without a docstring."""
    return [read(path) for path in sorted(folder.glob("*.py"))]


def read(path: Path) -> Idiom:
    """Parse a script's docstring without running the script. Raises ValueError if it has none."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise ValueError(f"{path} has no docstring")
    title, _, rest = docstring.partition("\n")
    directives: dict[str, str] = {}
    lines = []
    for line in rest.strip().splitlines():
        word, colon, said = line.partition(":")
        if colon and word in _DIRECTIVES:
            directives[word] = said.strip()
        else:
            lines.append(line)
    text = "\n".join(lines).strip()
    return Idiom(path=path, title=title.rstrip("."), text=text, directives=directives)


# -- the page ---------------------------------------------------------------------------------

_BEGIN = f"""# Idioms

<!-- Generated from the docstrings of tests/idioms by scripts/idioms_table.py. -->

Common training patterns, written for this package. Each entry links to a complete script. `make
test` runs every script with one worker, and with three workers of which one is killed at a random
line, with or without a replacement (`make soak`: at twenty random places each, and with three
undisturbed workers). The final weights, all other results and the number of steps must match those
of the run with one worker, to within {TOLERANCE:.0e} unless the entry states otherwise.

Every script calls `run.retry` or `run.attempts()`, so that workers survive the failure of a peer.
"""
_REFUSED = """
## What is refused

Each of the following raises an error at its first use, before any state has changed. The error
names the remedy.
"""


def page() -> str:
    """docs/idioms.md."""
    works = idioms()
    parts = [_BEGIN]
    for group in GROUPS:
        parts.append(f"\n## {group}\n\n")
        parts += [_line(idiom) for idiom in works if idiom.directives["Group"] == group]
    parts.append(_REFUSED)
    parts += [_paragraph(idiom) for idiom in idioms(REFUSED)]
    return "".join(parts)


def _line(idiom: Idiom) -> str:
    text = " ".join([*idiom.text.split(), *_conditions(idiom)])
    return f"- **{_link(idiom)}**" + (f": {text}\n" if text else "\n")


def _conditions(idiom: Idiom) -> list[str]:
    """How the comparison differs from the default, as sentences."""
    said = idiom.directives
    conditions = []
    if "Compared" in said:
        conditions.append(f"(Compared {said['Compared']}.)")
    if "Inexact" in said:
        conditions.append(f"(`{said['Inexact'].replace(' to ', '` agrees to within ', 1)}.)")
    if "Tolerance" in said:
        conditions.append(f"(Weights agree to within {said['Tolerance']}.)")
    return conditions


def _paragraph(idiom: Idiom) -> str:
    return f"\n**{_link(idiom)}** (“{idiom.refusal}”)\n\n{idiom.text}\n"


def _link(idiom: Idiom) -> str:
    path = idiom.path.relative_to(HERE.parent.parent).as_posix()
    return f"[{idiom.title}](../{path})"
