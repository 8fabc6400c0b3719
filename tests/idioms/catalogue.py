"""The idioms: one small script each, in ``scripts``, and those that are refused, in ``refused``.

A script's docstring says what the documentation says about it. Its first line is the title; lines
that begin with one of these words are for the tests as well:

- ``Tolerance: 0.02, because …``: how far weights may be from the same script's alone; 1e-6 without
- ``Compared: …``: only the ranks are compared with each other, and why
- ``Refused: …``: a part of the message with which the script ends
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SCRIPTS, REFUSED = HERE / "scripts", HERE / "refused"
TOLERANCE = 1e-6


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

    @property
    def is_compared_alone(self) -> bool:
        """Whether weights are compared with those of one process, and not only among ranks."""
        return "Compared" not in self.directives

    @property
    def refusal(self) -> str:
        """A part of the message; "" if the idiom works."""
        return self.directives.get("Refused", "")


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
        if colon and word in ("Tolerance", "Compared", "Refused"):
            directives[word] = said.strip()
        else:
            lines.append(line)
    return Idiom(path=path, title=title.rstrip("."), text="\n".join(lines), directives=directives)
