"""Colours of charts and pages have enough contrast with their background, in both themes."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from elastic.report.render import COLOURS, name_of
from elastic.telemetry.goodput import Activity

TEXTS = ("ink", "muted", "link", "good", "bad")


def luminance(colour: str) -> float:
    """Relative luminance, as defined in WCAG 2.1."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_have_enough_contrast(theme: int) -> None:
    paper, panel = COLOURS["paper"][theme], COLOURS["panel"][theme]
    for activity in Activity:
        assert contrast(COLOURS[name_of(activity)][theme], paper) >= 3, activity
    for name in TEXTS:
        assert contrast(COLOURS[name][theme], paper) >= 4.5, name
        assert contrast(COLOURS[name][theme], panel) >= 4.5, name


def test_each_light_colour_has_one_name() -> None:
    """Charts are drawn in light colours, which are then replaced by CSS variables."""
    drawn = [light for light, _ in COLOURS.values()]
    assert len(drawn) == len(set(drawn))


def test_the_dashboard_has_the_same_colours() -> None:
    """Its legend names the colours of the charts."""
    page = (files("elastic.cli") / "dashboard.html").read_text()
    roots = re.findall(r":root\{(.*?)\}", page, re.DOTALL)
    assert len(roots) == 2, "light and dark"
    for theme, declared in enumerate(roots):
        found = dict(re.findall(r"--([\w-]+):(#\w+)", declared))
        assert {name: found.get(name) for name in COLOURS} == {
            name: pair[theme] for name, pair in COLOURS.items()
        }
