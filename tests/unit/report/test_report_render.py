"""The report as a page and as text: content, access, colours, damaged or hostile journals."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from kit.made_up_run import MadeUpProcess, write_run

from elastic.cli.main import main
from elastic.report.model import Curve, GenerationMark, RunReport, report_of
from elastic.report.render import (
    COLOURS,
    MAX_BYTES,
    Chart,
    curve_chart,
    html,
    largest,
    markdown,
    name_of,
    svg,
    timeline_chart,
)
from elastic.telemetry.goodput import Activity
from elastic.telemetry.log import duration
from elastic.telemetry.reader import merge, read_folder

VOID = frozenset({"meta", "link", "br", "hr", "img", "input", "use", "path"})


class Page(HTMLParser):
    """The page as a browser parses it: elements with their attributes, and the text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.source = source
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag
        if tag in ("td", "th", "p", "li", "dd", "dt", "h1", "h2", "h3", "text", "title"):
            self.texts.append(" ")

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())

    def having(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def report_in(folder: Path) -> RunReport:
    return report_of(merge(*read_folder(folder)))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunReport:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder)
    return report_in(folder)


@pytest.fixture(scope="module")
def page(report: RunReport) -> Page:
    return Page(html(report))


def test_the_page_summarizes_events_and_their_cost(page: Page) -> None:
    assert "The job succeeded after 2 min 1 s." in page.text
    assert "It committed 105 steps on 2 to 3 nodes; " in page.text
    assert "1 failure and 1 planned change paused training for " in page.text
    for sentence in (
        "lost: node-1 was lost",
        "joined: node-3 joined",
        "peer-lost (high)",
        "rank 1 is stopped (SIGSTOP)",
        "/runs/hangs/g2.txt on node-0",
        "node-1 wrote nothing in the last",
        "loss: last 0.118",
    ):
        assert sentence in page.text
    # The failure of generation 1: the checkpoint was 10 s old, and 11 steps behind.
    assert "1 step-20 10.0 s 11 the state of the surviving workers" in page.text


def test_a_paused_world_does_not_affect_the_node_range(report: RunReport) -> None:
    paused = replace(report.marks[0], generation=9, cause="paused", nodes=("node-0",))
    timeline = replace(report.timeline, marks=(*report.marks, paused))
    assert "It committed 105 steps on 2 to 3 nodes; " in replace(report, timeline=timeline).sentence


def test_an_incident_lists_the_duration_of_each_phase(report: RunReport, page: Page) -> None:
    lost, joined = report.incidents
    assert (lost.cause, lost.is_failure) == ("lost", True)
    assert (joined.cause, joined.is_failure) == ("joined", False)
    assert (lost.step, lost.steps_at_risk) == (31, 11)
    assert lost.checkpoint_age_s == pytest.approx(10.0, abs=0.01)
    phases = {activity.value: took_s for activity, took_s in lost.phases}
    assert phases["abort"] == pytest.approx(0.4, abs=0.01)
    assert sum(phases.values()) == pytest.approx(lost.pause_s)
    assert f"{duration(lost.pause_s)} {largest(lost.phases, 8)}" in page.text
    # Two of three nodes went through it: of the run's time, it cost less than its pause.
    assert lost.cost_s == pytest.approx(lost.pause_s * 2 / 3, abs=0.05)


BOOM = 'Traceback (most recent call last):\n  File "a", line 1, in f\nValueError: boom'


def test_the_first_error_is_in_the_first_line_of_its_incident(tmp_path: Path) -> None:
    """Not the errors of others, which only say that a peer is gone."""
    processes = write_run(tmp_path)
    agent, worker = processes[1], processes[6]
    agent.write(40.8, "worker-died", local_rank=0, reason=BOOM)
    place = {"step": 31, "generation": 1}
    worker.write(40.9, "world-fault", error="KeyError: 'x'", rank=1, **place)
    aborted = "elastic.errors.GroupAborted: the group was taken down"
    processes[4].write(40.9, "world-fault", error="", traceback=aborted, rank=0, **place)
    for process in (agent, worker, processes[4]):
        (tmp_path / process.path).write_text("\n".join(process.lines) + "\n")
    report = report_in(tmp_path)
    (failure,) = report.failures
    assert failure.errors == (
        ("node-1", BOOM),
        ("node-2", "KeyError: 'x'"),
    )
    what = "node-1 was lost; node-1: ValueError: boom"
    assert what in Page(html(report)).text and what in "\n".join(markdown(report))


def test_the_page_is_self_contained(page: Page) -> None:
    assert {tag for tag, _ in page.elements}.isdisjoint(
        {"script", "link", "img", "iframe", "object"}
    )
    for _, attributes in page.elements:
        assert not any(name.startswith("on") for name in attributes)
        for name in ("href", "src", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    (policy,) = [a for a in page.having("meta") if a.get("http-equiv")]
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_the_page_is_accessible_to_screen_readers(page: Page) -> None:
    assert page.having("html") == [{"lang": "en"}]
    tags = [tag for tag, _ in page.elements]
    assert [tags.count(t) for t in ("main", "header", "nav", "footer", "h1")] == [1, 1, 1, 1, 1]
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids)), "an id names one element"
    charts = page.having("svg")
    assert len(charts) == 4
    for _, attributes in page.elements:
        for name in ("aria-labelledby", "href", "clip-path"):
            for target in re.findall(
                r"#?([\w-]+)" if name == "aria-labelledby" else r"#([\w-]+)",
                attributes.get(name) or "",
            ):
                assert target in ids
    assert all(chart["role"] == "img" and chart["aria-labelledby"] for chart in charts)
    for scrolled in (a for _, a in page.elements if a.get("class") == "scroll"):
        assert scrolled["tabindex"] == "0"
        assert scrolled["aria-label"]
    levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h[1-6]", tag)]
    assert all(b <= a + 1 for a, b in pairwise(levels)), "no level is skipped"


def test_charts_follow_the_theme(page: Page) -> None:
    assert page.source.count("@media(prefers-color-scheme:dark)") == 1
    drawn = [a for _, a in page.elements if "stroke" in a or "fill" in a]
    assert len(drawn) > 20
    for attributes in drawn:
        for colour in (attributes.get("stroke"), attributes.get("fill")):
            assert colour in (None, "none") or colour[6:-1] in COLOURS, "a fixed colour"
    assert not [a for _, a in page.elements if "style" in a]


HOSTILE = "<script>alert(1)</script>\"'&$\\frac{$\x1b[2J\x00\u202e" + "x" * 1_000_000


def test_hostile_text_is_escaped_and_truncated(tmp_path: Path) -> None:
    write_run(
        tmp_path,
        names=(HOSTILE[:200_000], "<img src=x onerror=y>", "{{ 7*7 }}", "node\n3"),
        run_id=HOSTILE[:900_000],
        error=HOSTILE[:900_000],
    )
    source = html(report_in(tmp_path))
    assert len(source.encode()) <= MAX_BYTES
    shown = Page(source)
    assert {tag for tag, _ in shown.elements} & {"script", "img"} == set()
    assert "<script>alert(1)</script>" in shown.text, "shown, not run"
    assert "{{ 7*7 }}" in shown.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e]", source)
    assert max(map(len, source.split())) < 20_000


def test_a_damaged_journal_is_reported_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "journals"
    write_run(folder, skews=(0.0, 0.0, 60.0, -60.0))
    cut = folder / "node0-worker.jsonl"
    cut.write_bytes(cut.read_bytes()[:-25])
    damaged = folder / "node2-worker.jsonl"
    lines = damaged.read_bytes().splitlines()
    lines[3] = b'{"event": "rank-times", "time": "\xff\xfe not JSON'
    damaged.write_bytes(b"\n".join(lines) + b"\n")
    (folder / "zzz.jsonl").write_bytes(b"\x00\xff" * 1000 + b"\n[]\n{}\n")
    outputs = {form: tmp_path / f"report.{form}" for form in ("html", "md", "json")}
    for output in outputs.values():
        assert main(["report", str(folder), "--output-file", str(output)]) == 0
        assert "the report is in" in capsys.readouterr().err
    for text in (
        Page(outputs["html"].read_text()).text,
        outputs["md"].read_text().replace("\\", ""),
        " ".join(json.loads(outputs["json"].read_text())["notes"]),
    ):
        for note in (
            "node0-worker.jsonl: the last line is truncated",
            "node2-worker.jsonl: 1 line is damaged or truncated and skipped, the first one is "
            "line 4",
            "the clock of node-2 is 60.0 s ahead: its times are corrected",
            "the clock of node-3 is 60.0 s behind: its times are corrected",
            "node-1 wrote nothing in the last",
            "zzz.jsonl: 3 lines are damaged",
        ):
            assert note in text


def test_the_page_of_a_large_run_stays_small(tmp_path: Path) -> None:
    leader = MadeUpProcess("node-0", "agent")
    nodes = [f"node-{n}" for n in range(40)]
    workers = [MadeUpProcess(name, "worker") for name in nodes]
    at_s, step = 10.0, 0
    for generation in range(1, 121):
        formed = {"nodes": nodes, "size": 40, "state": "active", "mode": "in-process"}
        formed |= {"generation": generation, "cause": "failure", "reason": "é<" * 500}
        leader.write(at_s, "world-formed", **formed)
        leader.write(at_s, "failure-judged", generation=generation, evidence="&\n" * 4000)
        leader.write(at_s, "hang-found", generation=generation, ranks=list(range(40)), reason="<")
        for rank, worker in enumerate(workers):
            place = {"rank": rank, "generation": generation}
            worker.write(at_s + 1, "world-joined", step=step, duration_s=0.1, **place)
            worker.window(at_s + 2, 1.0, step + 1, 1, ended="first-step", **place)
            worker.window(at_s + 90, 80.0 + rank % 7, step + 11, 10, ended="fault", **place)
            worker.write(at_s + 91, "world-fault", step=step + 11, error="'&" * 5000, **place)
        for number in range(20):
            workers[0].write(
                at_s + 3 + number,
                "metrics",
                step=step * 2 + number,
                values={f"m{i}": number % 5 + i for i in range(8)},
            )
        at_s, step = at_s + 100, step + 11
    for process in (leader, *workers):
        (tmp_path / process.path).write_text("\n".join(process.lines) + "\n")
    report = report_in(tmp_path)
    assert (len(report.incidents), len(report.curves)) == (119, 4)
    source = html(report)
    assert len(source.encode()) <= MAX_BYTES == 250_000
    shown = Page(source)
    assert "more incidents are omitted" in shown.text
    assert 8 <= report.timeline.hidden_nodes < 40, "some of the 40 have a lane"
    assert f"{report.timeline.hidden_nodes} more nodes are not shown" in shown.text


def test_the_extension_sets_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "journals"
    write_run(folder)
    for name, begin in (("a.html", "<!DOCTYPE html>"), ("a.md", "# Run demo"), ("a.json", "{")):
        assert main(["report", str(folder), "--output-file", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_text().startswith(begin)
    assert main(["report", str(folder), "-o", "html"]) == 0, "into a pipe"
    assert capsys.readouterr().out.startswith("<!DOCTYPE html>")
    assert main(["report", str(folder), "--output-file", "json"]) == 2
    assert "-o html|md|json" in capsys.readouterr().err
    assert main(["report", str(folder), "--output-file", str(tmp_path / "missing" / "a.html")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"a.html", "a.json", "a.md", "journals"}


# Charts -------------------------------------------------------------------------------------------


def texts_of(chart: Chart) -> str:
    return " ".join("".join(element.itertext()) for element in ET.fromstring(svg(chart)).iter())


def test_a_chart_of_one_or_equal_values_is_drawn() -> None:
    mark = GenerationMark(2, 0.0, "lost", "", 2, (), step=1)
    for steps, value in (((1,), 1.0), ((1, 9), 0.0)):
        curve = Curve("loss", steps, (value,) * len(steps), len(steps), value, value, value)
        assert "Generation 2 from step 1: lost." in texts_of(curve_chart(curve, [mark]))


def test_the_timeline_describes_its_generations(report: RunReport) -> None:
    assert "Generation 2 after 41.0 s: lost." in texts_of(timeline_chart(report.timeline))


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
