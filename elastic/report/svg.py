"""SVG by matplotlib adapted for a page: themed, accessible, small, and without id conflicts.

Colours become CSS variables that follow the reader's theme, in the page and in a separate file. A
chart has a title and a description for screen readers, and only ids that it refers to.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from elastic.report.palette import COLOURS, variables

CHART_CLASS = "elastic-chart"
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "{http://www.w3.org/1999/xlink}href"
_VARIABLES = {light: name for name, (light, _) in COLOURS.items()}
_COLOUR = re.compile(r"#[0-9a-f]{6}")
_LONG_NUMBER = re.compile(r"(-?\d+\.\d)\d+")
_FONT = re.compile(r"font: (?:([\w ]+) )?([\d.]+)px [^;]*")  # matplotlib before 3.11
_FAMILY = re.compile(r"font-family: [^;]*;? ?")
_NO_ROTATION = re.compile(r"rotate\(-?0(?:\.0)? [^)]*\)")
_NAME = re.compile(r"var\(--([\w-]+),")
_REFERENCE = re.compile(r"#([\w-]+)")
_DROPPED = {f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"}


def adapt(raw: str, *, name: str, title: str, description: str) -> str:
    """matplotlib's output as an element for a page, or a separate file. ``name``, the prefix of its
    ids, is unique on a page."""
    root = ET.fromstring(raw)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in _DROPPED:
                parent.remove(child)
    used = {match for element in root.iter() for match in _references(element)}
    for element in root.iter():
        _clean(element, used, name)
    _flatten(root)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.set("class", CHART_CLASS)
    root.set("style", "background:var(--paper,#ffffff)")
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-description")
    style = ET.Element("style")
    style.text = _styles(root)
    heads = (("title", title), ("desc", description))
    for place, (tag, text) in enumerate(heads):
        head = ET.Element(tag, {"id": f"{name}-{'title' if tag == 'title' else 'description'}"})
        head.text = text
        root.insert(place, head)
    root.insert(2, style)
    for element in root.iter():
        element.tag = element.tag.replace(f"{{{_SVG}}}", "")
    root.set("xmlns", _SVG)
    return ET.tostring(root, encoding="unicode")


def _styles(root: ET.Element) -> str:
    used = {name for e in root.iter() for name in _NAME.findall(e.get("style", ""))}
    own = variables(f".{CHART_CLASS}", [name for name in COLOURS if name in used])
    return f"{own}.{CHART_CLASS} text{{font-family:{FONT}}}"


def _references(element: ET.Element) -> list[str]:
    texts = [v for k, v in element.attrib.items() if k != "id" and "#" in v]
    return [match for text in texts for match in _REFERENCE.findall(text)]


def _clean(element: ET.Element, used: set[str], name: str) -> None:
    attributes = element.attrib
    own = attributes.pop("id", None)
    if own in used:
        attributes["id"] = f"{name}-{own}"
    if (target := attributes.pop(_XLINK, None)) is not None:
        attributes["href"] = f"#{name}-{target[1:]}"
    if "clip-path" in attributes:
        attributes["clip-path"] = attributes["clip-path"].replace("#", f"#{name}-")
    for key in ("d", "x", "y", "transform"):
        if key in attributes:
            attributes[key] = " ".join(_LONG_NUMBER.sub(r"\1", attributes[key]).split())
    if "style" in attributes:
        style = _FAMILY.sub("", _FONT.sub(_font, attributes["style"]))
        style = _COLOUR.sub(_variable, style).replace("stroke-linecap: square", "")
        attributes["style"] = style.replace(": ", ":").replace("; ", ";").strip("; ")
    if not _NO_ROTATION.sub("", attributes.get("transform", "-")).strip():
        del attributes["transform"]
    if element.text is not None and not element.text.strip():
        element.text = None
    if element.tail is not None and not element.tail.strip():
        element.tail = None


def _variable(match: re.Match[str]) -> str:
    name = _VARIABLES.get(match[0])
    return match[0] if name is None else f"var(--{name},{match[0]})"


def _font(match: re.Match[str]) -> str:
    weight = f";font-weight:{match[1]}" if match[1] else ""
    return f"font-size:{match[2]}px{weight}"


def _flatten(element: ET.Element) -> None:
    """Remove groups without attributes, which are redundant."""
    flat = []
    for child in element:
        _flatten(child)
        is_bare = child.tag == f"{{{_SVG}}}g" and not child.attrib
        flat += list(child) if is_bare else [child]
    element[:] = flat
