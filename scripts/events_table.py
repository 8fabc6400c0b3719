"""Write docs/reference/events.md: every event of a journal, with its fields.

python scripts/events_table.py          # write the page

The source is elastic/telemetry/events.py: the docstring of an event is its meaning, the comment
behind a field (or above it) that of the field. The fields of every line are in
elastic/telemetry/journal.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from elastic.telemetry import events
from elastic.telemetry.goodput import Activity
from elastic.telemetry.journal import ENVELOPE, SCHEMA, kebab_name
from elastic.tuning.intervals import STEP_TIMES_S

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "events.md"
SOURCE = ROOT / "elastic" / "telemetry" / "events.py"
ACTIVITIES = ROOT / "elastic" / "telemetry" / "goodput.py"

INTRODUCTION = f"""\
<!-- Written by scripts/events_table.py from elastic/telemetry/events.py: edit that. -->
# Events

Every process of a job writes its events to `<node>-<pid>.jsonl`, one JSON object per line, in the
first of these folders that is known and can be written:

1. `ELASTIC_JOURNAL` in the environment of the agents (`none`: no journal);
2. `journal/RUN` in the job's checkpoint folder: lines move there when a worker has named it to its
   agent;
3. `elastic/RUN/journal` in the user's state folder (`XDG_STATE_HOME`, by default
   `~/.local/state`).

What workers and agents write to their terminal is in `elastic/RUN/logs` of the state folder, with
the same bounds: `elastic logs RUN` prints it. `ELASTIC_JOURNAL=none` turns both off.

So the journals of all nodes meet where they share the checkpoint folder. `elastic events RUN`
prints all events in order of time, `elastic report RUN` summarizes them; both also take a folder.
On the machine of an agent they know where a run's journals are. Nodes whose journals are elsewhere
are named as `incomplete: nodes … missing`: copy their files into one folder.

Schema version {SCHEMA}. Fields may be added to it; it is incremented if a field changes its meaning
or is removed. Readers ignore unknown fields.

## Every line

| field | meaning |
|---|---|
| `event` | the kind, from the list below |
| `seq` | number of the line within its process, from 0; a gap: lines were rotated away or lost |
| `time` | wall clock, seconds since 1970 (UTC) |
| `monotonic` | monotonic clock of the machine, seconds; orders all processes of one machine |
| `writer` | identifies the process: a new one each time a process begins a journal |
| `node` | name of the node |
| `node_id` | agents only: the node's id, new each time its agent starts |
| `rank` | workers only: global rank, in the world that the process is in |
| `generation` | of the world that the process is in, or that the event is about |
| `step` | committed by the process, or that the event is about |

## Guarantees

- A line is one `write` to a file opened for appending. A process that is killed leaves at most its
  last line truncated, which is then not valid JSON; later writes begin on a new line.
  A disk that hangs delays a process by one second, once; up to 10,000 later lines wait in memory.
  Lines are not synced to the disk: they survive the end of the process, but not of the machine.
- A process uses at most 64 MiB, in eight files
  (`<node>-<pid>.N.jsonl` are older). Beyond that it removes its oldest file except the first.
  Each start of a process adds a file. In `ELASTIC_JOURNAL` none is removed: a report needs those of
  the whole run; `find FOLDER -mtime +30 -delete` bounds a run id that lives for months. In the
  other folders a node that starts removes its oldest files beyond 256 MiB, and the state folder
  keeps the 50 newest runs and 1 GiB.
- A full or broken disk costs events (a gap in `seq`, one warning), never a step.
- Texts are ASCII with JSON's escapes, shortened to 16,384 characters each. Exceptions and host
  names may contain any characters: escape them before you show them, as `elastic events` does.
- Times of machines with different clocks are corrected by an event that all of them write at the
  same time: `world-joined`. `elastic events` prints the corrections.

## Goodput

`rank-times` sums up every {STEP_TIMES_S:g} s how a rank has spent its time, at a cost of less than
50 µs per step. With the other events it accounts for all wall time of a run, of each node and of
each change of the world (`elastic/telemetry/goodput.py`). The parts are:

| part | meaning |
|---|---|
"""


def page() -> str:
    """The whole page."""
    return INTRODUCTION + "".join(_activities()) + "\n## Kinds of events\n" + "".join(_events())


def _activities() -> Iterator[str]:
    lines = ACTIVITIES.read_text().splitlines()
    tree = ast.parse("\n".join(lines))
    (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Activity")
    for statement in cls.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            activity = Activity[statement.targets[0].id]
            yield f"| {activity.value} | {_comment(lines, statement)} |\n"


def _events() -> Iterator[str]:
    lines = SOURCE.read_text().splitlines()
    for node in ast.parse("\n".join(lines)).body:
        if not isinstance(node, ast.ClassDef) or node.name == "Event":
            continue
        name = kebab_name(getattr(events, node.name))
        meaning = " ".join((ast.get_docstring(node) or "").replace("``", "`").split())
        yield f"\n### `{name}`\n\n{meaning}\n"
        rows = [s for s in node.body if isinstance(s, ast.AnnAssign)]
        if rows:
            yield "\n| field | type | meaning |\n|---|---|---|\n"
        for row in rows:
            assert isinstance(row.target, ast.Name)
            field = f"of_{row.target.id}" if row.target.id in ENVELOPE else row.target.id
            kind = ast.unparse(row.annotation).replace("|", "or")
            yield f"| `{field}` | {kind} | {_comment(lines, row)} |\n"


def _comment(lines: list[str], statement: ast.stmt) -> str:
    """What follows on a line."""
    line = lines[statement.lineno - 1]
    return line.partition("  # ")[2].replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
