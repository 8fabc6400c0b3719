"""Messages and pages name only existing functions, arguments, flags and files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields

import pytest
from named_apis import (
    REPOSITORY,
    Text,
    codes_of,
    messages,
    pages,
    strings_of,
    unknown_command_lines,
    unknown_commands,
    unknown_files,
    unknown_flags,
    unknown_keywords,
    unknown_names,
    unknown_variables,
)

from elastic.tuning.options import AgentOptions

Finder = Callable[[str], Iterator[str]]


def unknown(texts: Iterable[Text], *finders: Finder) -> list[str]:
    return [
        f"{text.place}: {name}" for text in texts for find in finders for name in find(text.text)
    ]


def test_messages_name_only_existing_apis() -> None:
    finders = (
        unknown_names,
        unknown_keywords,
        unknown_flags,
        unknown_commands,
        unknown_variables,
        unknown_files,
    )
    assert unknown(messages(), *finders) == []


def test_pages_name_only_existing_apis() -> None:
    finders = (
        unknown_names,
        unknown_keywords,
        unknown_command_lines,
        unknown_variables,
        unknown_files,
    )
    assert unknown(pages(), *finders) == []


@pytest.mark.parametrize(
    ("text", "find", "named"),
    [
        ("call run.generate() first", unknown_names, ["run.generate"]),
        ("read run.world.rank, not run.world.place", unknown_names, ["run.world.place"]),
        ("elastic.Run and elastic.Runner", unknown_names, ["elastic.Runner"]),
        ("`checkpoints.nothing.LatestN`", unknown_names, ["checkpoints.nothing.LatestN"]),
        ("elastic.join(checkpoints=…, folder=…)", unknown_keywords, ["elastic.join(folder=)"]),
        ("run.loader(…, batch=3)", unknown_keywords, ["run.loader(batch=)"]),
        ("give --nnodes, not --nodez", unknown_flags, ["--nodez"]),
        ("`elastic walk` does not exist", unknown_commands, ["elastic walk: walk"]),
        ("`elastic checkpoints lose`", unknown_commands, ["elastic checkpoints lose: lose"]),
        ("`elastic run --nodez=3 x.py`", unknown_commands, ["elastic run --nodez=3 x.py: --nodez"]),
        ("`elastic run -h`, `elastic run x.py --lr 1`", unknown_commands, []),
        ("set ELASTIC_LEASE_S and ELASTIC_LEESE_S", unknown_variables, ["ELASTIC_LEESE_S"]),
        ("see docs/nowhere.md, docs/data.md", unknown_files, ["docs/nowhere.md"]),
        ("test_messages_name_only_existing_apis, test_nothing", unknown_files, ["test_nothing"]),
    ],
)
def test_an_unknown_name_is_found(text: str, find: Finder, named: list[str]) -> None:
    assert list(find(text)) == named


def test_strings_are_read_with_gaps_and_without_docstrings() -> None:
    source = '"""A run.docstring."""\nraise E(f"{a} in run.x", hint="say " "run.y")\n'
    assert [s.text for s in strings_of(source, "a.py")] == ["… in run.x", "say run.y"]


def test_code_is_read_from_blocks_and_inline_spans() -> None:
    page = "a `run.x` b\n```diff\n-run.old()\n+run.new()\n```\n```text\nrun.log\n```\n"
    assert [c.text for c in codes_of(page, "a.md")] == ["run.new()", "run.x"]


def test_every_decision_is_in_the_index() -> None:
    folder = REPOSITORY / "docs" / "decisions"
    index = (folder / "README.md").read_text()
    decisions = sorted(path.name for path in folder.glob("[0-9]*.md"))
    assert decisions and [name for name in decisions if f"({name})" not in index] == []


def test_every_option_is_in_the_reference() -> None:
    page = (REPOSITORY / "docs" / "reference" / "options.md").read_text()
    assert [f.name for f in fields(AgentOptions) if f"`{f.name}`" not in page] == []
