"""Colours of charts and pages, each for a light and a dark background, as CSS variables.

Contrast is at least 3:1 against the background, for texts 4.5:1 (WCAG 2.1). Charts do not rely on
colour alone: a table next to each contains the same information.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elastic.telemetry.activities import Activity

# name: (light, dark). The light ones are distinct: a chart is drawn in them, and they are replaced.
COLOURS: Mapping[str, tuple[str, str]] = {
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "line": ("#d1d9e0", "#3d444d"),
    "paper": ("#ffffff", "#0d1117"),
    "panel": ("#f6f8fa", "#151b23"),
    "link": ("#0969da", "#4493f8"),
    "good": ("#1a7f37", "#3fb950"),
    "bad": ("#d1242f", "#f85149"),
    "productive": ("#2c974b", "#3fb970"),
    "start-up": ("#7d8898", "#8d99ad"),
    "waiting-for-nodes": ("#6b4fa0", "#9f86d6"),
    "data-wait": ("#a38300", "#e3c341"),
    "checkpoint-stall": ("#0072b2", "#4aa8e0"),
    "straggling": ("#5b8c00", "#93cf3a"),
    "evaluation": ("#1b8a8f", "#3bbfc4"),
    "recomputed-steps": ("#d06c00", "#ff9d3b"),
    "detection": ("#b00020", "#ff5d6c"),
    "abort": ("#d1495b", "#e8808d"),
    "rendezvous": ("#c2185b", "#f06a9b"),
    "rebuild": ("#8e3b9e", "#c77bd6"),
    "state-transfer": ("#a0522d", "#cf8a66"),
    "first-step": ("#76762a", "#b5b556"),
    "shutdown": ("#4f73a8", "#7f9fcb"),
    "unreported": ("#5c6470", "#a9b2bf"),
    "no-nodes": ("#3d3d3d", "#d0d0d0"),
}


def name_of(activity: Activity) -> str:
    """The name of an activity's colour, also valid as a CSS class.

    >>> name_of(Activity.DATA)
    'data-wait'
    """
    return activity.value.replace(" ", "-")


def light(name: str) -> str:
    """The colour that charts are drawn in."""
    return COLOURS[name][0]


def variables(selector: str, names: Iterable[str] = tuple(COLOURS)) -> str:
    """CSS: colours for ``selector``, by the reader's theme."""
    chosen = {name: COLOURS[name] for name in names}
    themes = [
        "".join(f"--{name}:{pair[theme]};" for name, pair in chosen.items()) for theme in (0, 1)
    ]
    return (
        f"{selector}{{{themes[0]}}}@media(prefers-color-scheme:dark){{{selector}{{{themes[1]}}}}}"
    )
