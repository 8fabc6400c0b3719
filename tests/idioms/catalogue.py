"""The idioms: one small script each, in ``scripts``, and those that are refused, in ``refused``.

A script's docstring is its entry in the documentation. Its first line is the title; lines
that begin with one of these words are not part of the text:

- ``Group: …``: its heading in docs/idioms.md
- ``Tolerance: 0.02, because …``: how far weights may be from the same script's alone; 1e-6 without
- ``Inexact: loss to 0.1, because …``: the same for one entry of the script's result
- ``Compared: …``: only the ranks are compared with each other, and why
- ``Refused: …``: a part of the message with which the script ends
- ``Workers: 3``: how many workers it takes for that; 1 without
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
    """A script, and what its docstring says."""

    path: Path
    title: str
    text: str  # paragraphs of Markdown
    directives: dict[str, str]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def tolerance(self) -> float:
        """Absolute and relative."""
        said = self.directives.get("Tolerance")
        return float(said.split(",")[0]) if said else TOLERANCE

    def tolerance_of(self, entry: str) -> float:
        """Of an entry of the result."""
        name, _, rest = self.directives.get("Inexact", "").partition(" to ")
        return float(rest.split(",")[0]) if name == entry else self.tolerance

    @property
    def is_compared_alone(self) -> bool:
        """Whether weights are compared with those of one process, and not only among ranks."""
        return "Compared" not in self.directives

    @property
    def refusal(self) -> str:
        """A part of the message; "" if the idiom works."""
        return self.directives.get("Refused", "")

    @property
    def workers(self) -> int:
        """How many it takes to notice what is refused."""
        return int(self.directives.get("Workers", "1"))


def idioms(folder: Path = SCRIPTS) -> list[Idiom]:
    """All of a folder, by name. Raises ValueError for a script that does not say what it is."""
    return [read(path) for path in sorted(folder.glob("*.py"))]


def read(path: Path) -> Idiom:
    """One script's docstring; the script is not run."""
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

Common training scripts, written for this package. Each entry links to a complete script. `make
test` runs it with one worker, with three, and with three of which one dies at a random line of the
script (`make soak`: at twenty places), with or without a replacement. The final weights, all other
results of the script and the number of steps must equal those of the run with one worker, to
{TOLERANCE:.0e} unless an entry states otherwise.

All of them call `run.retry` or `run.attempts()`, so that workers survive.
"""
_REFUSED = """
## What is refused

Each of these is refused at its first use, before any state has changed, with a message that names
the remedy.
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
    """In what way less is compared than elsewhere."""
    said = idiom.directives
    conditions = []
    if "Compared" in said:
        conditions.append(f"(Compared {said['Compared']}.)")
    if "Inexact" in said:
        conditions.append(f"(Its `{said['Inexact'].replace(' to ', '` agrees to ', 1)}.)")
    if "Tolerance" in said:
        conditions.append(f"(Weights agree to {said['Tolerance']}.)")
    return conditions


def _paragraph(idiom: Idiom) -> str:
    return f"\n**{_link(idiom)}** (“{idiom.refusal}”)\n\n{idiom.text}\n"


def _link(idiom: Idiom) -> str:
    path = idiom.path.relative_to(HERE.parent.parent).as_posix()
    return f"[{idiom.title}](../{path})"
