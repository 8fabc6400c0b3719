"""The dashboard in a real Chromium: live updates, restarts, no JavaScript, phones, and axe.

Screenshots are saved in build/dashboard.
"""

from __future__ import annotations

import base64
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from axe_core_python.selenium import Axe
from dashboard_kit import DashboardUnderTest, FakeJob
from kit.made_up_run import write_run
from selenium import webdriver
from selenium.common.exceptions import JavascriptException, WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from elastic.membership.records import NodeState
from elastic.report.model import report_of
from elastic.report.render import html
from elastic.telemetry.events import WorkerDied
from elastic.telemetry.journal import Journal
from elastic.telemetry.reader import merge, read_folder
from elastic.testing.waiting import PATIENCE_S, eventually

SCREENSHOTS = Path(__file__).parents[3] / "build" / "dashboard"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DRIVER = shutil.which("chromedriver")
ARGUMENTS = (
    *("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"),
    *("--disable-background-networking", "--no-first-run", "--hide-scrollbars"),
)
HOSTILE = "<img src=x onerror='window.hacked=1'>\x1b[2J"
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs Debian's packages chromium and chromium-driver",
)


@contextmanager
def chromium(*, javascript: bool = True) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in ARGUMENTS:
        options.add_argument(argument)
    if not javascript:
        options.add_experimental_option(
            "prefs", {"profile.managed_default_content_settings.javascript": 2}
        )
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(PATIENCE_S)
    driver.set_script_timeout(PATIENCE_S)
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as driver:
        yield driver


@pytest.fixture
def job() -> FakeJob:
    fake_job = FakeJob()
    fake_job.train()
    return fake_job


def show(browser: Any, port: int, *, size: str = "desktop", dark: bool = False) -> None:
    """Open the page and wait until it is live."""
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
    browser.get("about:blank")  # the last page may still call its server, which is gone
    browser.get_log("browser")
    browser.get(f"http://127.0.0.1:{port}/")
    eventually(lambda: live(browser), "the page is live")


def live(browser: Any) -> str:
    """The server that the page is connected to, or "" if there is none yet."""
    return str(browser.execute_script("return document.documentElement.dataset.live || ''"))


def page_text(browser: Any) -> str:
    return str(browser.execute_script("return document.body.innerText"))


def sees(browser: Any, text: str) -> Callable[[], bool]:
    def is_there() -> bool:
        try:
            return text in page_text(browser)
        except (JavascriptException, WebDriverException):  # the page is just being loaded
            return False

    return is_there


def console_messages(browser: Any) -> list[str]:
    """The console messages of all levels."""
    return [entry["message"] for entry in browser.get_log("browser")]


def save_screenshot(browser: Any, name: str) -> None:
    """Save a screenshot of the full page."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    height = browser.execute_script("return document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": browser.execute_script("return innerWidth"), "scale": 1}
    taken = browser.execute_cdp_cmd(
        "Page.captureScreenshot",
        {"clip": {**clip, "height": min(height, 6000)}, "captureBeyondViewport": True},
    )
    (SCREENSHOTS / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))


def test_a_kill_is_shown_without_a_reload_and_the_focus_is_kept(
    browser: Any, job: FakeJob, tmp_path: Path
) -> None:
    journal = Journal(folder=tmp_path, identity={"node": "n2"}, run_id="llama-7", role="agent")
    with DashboardUnderTest(job, tmp_path).served() as port:
        show(browser, port)
        eventually(sees(browser, "training in generation 7 with 4 of 4 nodes"), "it trains")
        region = browser.find_element(By.CSS_SELECTOR, "[aria-label='Nodes, table']")
        browser.execute_script("arguments[0].focus()", region)
        began_s = time.monotonic()
        journal.emit(WorkerDied(pid=1, local_rank=0, reason="killed by signal 9 (SIGKILL)"))
        job.kill("n2")
        eventually(sees(browser, "local rank 0 died: killed by signal 9"), "the journal's event")
        eventually(sees(browser, "n2 was lost"), "etcd's world")
        print(f"a kill is shown after {1000 * (time.monotonic() - began_s):.0f} ms")
        assert "3 of 4 nodes" in page_text(browser)
        assert browser.title.startswith("training · llama-7")
        spoken = browser.find_element(By.ID, "spoken").get_attribute("textContent")
        assert spoken == "training, generation 8"
        focused = browser.switch_to.active_element.get_attribute("aria-label")
        assert focused == "Nodes, table", "the replaced element has the focus again"
        assert console_messages(browser) == []


def test_heartbeats_are_updated_within_the_existing_table(browser: Any, job: FakeJob) -> None:
    """A selection in the table, such as a node's name, is kept."""
    with DashboardUnderTest(job).served() as port:
        show(browser, port)
        eventually(lambda: cell(browser, "step-3") == "52", "the nodes")
        assert cell(browser, "heartbeat-3").endswith("s ago")
        name = "document.querySelector('[aria-labelledby=live-nodes] tbody th')"
        browser.execute_script(f"getSelection().selectAllChildren({name})")
        assert browser.execute_script("return String(getSelection())").startswith("n1")
        job.progress(60, silent=("n4",))
        eventually(lambda: cell(browser, "step-3") == "60", "its step")
        eventually(lambda: cell(browser, "heartbeat-3").endswith("ago late"), "its silence")
        eventually(sees(browser, "no heartbeat of n4 for 2"), "the sentence")
        assert not cell(browser, "heartbeat-0").endswith("late")
        assert browser.execute_script("return String(getSelection())").startswith("n1")
        assert console_messages(browser) == []


def cell(browser: Any, identity: str) -> str:
    """The text of a table's cell, or "" if it does not exist."""
    script = f"return (document.getElementById('{identity}') || {{}}).textContent || ''"
    return str(browser.execute_script(script)).strip()


def test_a_page_survives_a_restart_of_its_server(browser: Any, job: FakeJob) -> None:
    with DashboardUnderTest(job).served() as port:
        show(browser, port)
        first = live(browser)
        eventually(sees(browser, "training in generation 7"), "it trains")
    eventually(sees(browser, "The dashboard server does not respond"), "that it is gone")
    assert "training in generation 7" in page_text(browser), "the last state is still shown"
    job.kill("n3")
    with DashboardUnderTest(job).served(port):
        eventually(sees(browser, "training in generation 8"), "the new state")
        eventually(lambda: live(browser) != first, "the new server")
        assert "does not respond" not in page_text(browser)


def test_hostile_names_are_escaped(browser: Any, job: FakeJob, tmp_path: Path) -> None:
    write_run(tmp_path, names=(HOSTILE, "b", "c", "d"), run_id="llama-7", error=HOSTILE)
    job.put_node("n4", None, NodeState.STARTING, name=HOSTILE)
    dashboard = DashboardUnderTest(job, tmp_path)
    with dashboard.served() as port:
        eventually(lambda: dashboard.feed.snapshot.report, "the report")
        show(browser, port)
        eventually(sees(browser, "<img src=x onerror="), "the name as text")
        eventually(
            lambda: browser.find_elements(By.CSS_SELECTOR, "[aria-labelledby=timeline] svg"),
            "a chart",
        )
        assert browser.execute_script("return window.hacked === undefined")
        assert browser.find_elements(By.CSS_SELECTOR, "img") == []
        assert console_messages(browser) == [], "the content security policy blocked nothing"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("theme", "size"),
    [
        ("light", "desktop"),
        ("light", "phone"),
        ("dark", "desktop"),
        ("dark", "phone"),
    ],
)
def test_contrast_labels_and_width_are_accessible(
    browser: Any, job: FakeJob, tmp_path: Path, size: str, theme: str
) -> None:
    write_run(tmp_path, run_id="llama-7")
    job.kill("n2")
    job.put_node("n2", None, NodeState.STARTING)
    job.progress(53, silent=("n3",))
    dashboard = DashboardUnderTest(job, tmp_path)
    with dashboard.served() as port:
        eventually(lambda: dashboard.feed.snapshot.report, "the report")
        eventually(lambda: dashboard.feed.snapshot.view, "etcd is read")
        show(browser, port, size=size, dark=theme == "dark")
        eventually(lambda: len(browser.find_elements(By.CSS_SELECTOR, "svg")) == 3, "the charts")
        job.server.disconnect()
        eventually(sees(browser, "etcd does not answer, or denies access"), "the outage")
        save_screenshot(browser, f"{size}-{theme}")
        width = browser.execute_script("return document.documentElement.scrollWidth")
        assert width <= SIZES[size][0], "nothing is cut off, and no horizontal scrolling is needed"
        found = Axe().run(browser)
        assert [(v["id"], v["nodes"][0]["html"]) for v in found["violations"]] == []
        assert len(found["passes"]) > 20
        assert console_messages(browser) == []


@pytest.mark.slow
def test_the_report_fits_a_laptop_and_is_accessible(browser: Any, tmp_path: Path) -> None:
    """With the phases of a pause in one column: a column for each was wider than the window."""
    names = ("trainer-0.llama.svc", "trainer-1.llama.svc", "trainer-2.llama.svc", "c")
    write_run(tmp_path / "journals", names=names)
    report = report_of(merge(*read_folder(tmp_path / "journals")))
    assert len(report.incidents[0].phases) >= 6
    path = tmp_path / "report.html"
    path.write_text(html(report))
    metrics = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(path.as_uri())
    regions = "[...document.querySelectorAll('.scroll')]"
    cut = f"return {regions}.filter(e => e.scrollWidth > e.clientWidth).map(e => e.ariaLabel)"
    assert browser.execute_script(cut) == []
    first = browser.find_element(By.CSS_SELECTOR, "[aria-label='Incidents, table'] tbody tr").text
    assert "trainer-1.llama.svc was lost" in first and "detection" in first
    found = Axe().run(browser)
    assert [(v["id"], v["nodes"][0]["html"]) for v in found["violations"]] == []
    assert console_messages(browser) == []


def test_all_controls_are_reachable_by_keyboard(browser: Any, job: FakeJob) -> None:
    job.kill("n2")
    with DashboardUnderTest(job).served() as port:
        show(browser, port)
        eventually(sees(browser, "n2 was lost"), "the page is complete")
        seen = []
        for _ in range(7):
            browser.switch_to.active_element.send_keys(Keys.TAB)
            element = browser.switch_to.active_element
            seen.append(element.get_attribute("aria-label") or element.text)
        assert seen == [
            "Skip to the nodes",
            "Nodes, table",
            "Recent incidents, table",
            "Events, table",
            "status",
            "events",
            "metrics",
        ]


@pytest.mark.slow
def test_without_javascript_the_page_is_complete_and_reloads_itself(job: FakeJob) -> None:
    dashboard = DashboardUnderTest(job)
    with chromium(javascript=False) as browser, dashboard.served() as port:
        eventually(lambda: dashboard.feed.snapshot.view, "etcd is read")
        browser.get(f"http://127.0.0.1:{port}/")

        def body() -> str:
            try:
                return str(browser.find_element(By.TAG_NAME, "body").text)
            except WebDriverException:  # the page is just being loaded
                return ""

        assert "training in generation 7 with 4 of 4 nodes" in body()
        assert "about 3 min 44 s" in body() and "n4" in body()
        job.kill("n2")
        # It does so every 10 s.
        eventually(lambda: "n2 was lost" in body(), "it has loaded itself again", poll_s=0.5)
        assert console_messages(browser) == []
