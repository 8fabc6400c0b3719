"""Docstrings as Markdown: Sphinx roles, literal blocks and doctests, as the sources use them."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:mod|class|func|meth|attr|data|exc):`~?([^`]+)`")
_LITERAL_BLOCK = re.compile(r"^(.*\S)?::$", re.MULTILINE)
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)  # up to a blank line


def as_markdown(text: str) -> str:
    """The same text without Sphinx's markup.

    >>> as_markdown("Made by :func:`join`::")
    'Made by `join`:'
    """
    text = _LITERAL_BLOCK.sub(lambda match: f"{match[1]}:" if match[1] else "", text)
    text = _DOCTEST.sub(lambda match: f"```pycon\n{match[0]}\n```", text)
    return _ROLE.sub(r"`\1`", text)


class SphinxRoles(griffe.Extension):
    """Applies :func:`as_markdown` to every docstring of the reference."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
