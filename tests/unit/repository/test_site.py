"""The documentation as it is read: in a browser, on a laptop and on a phone, and by its search."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver

REPOSITORY = Path(__file__).parents[3]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DRIVER = shutil.which("chromedriver")
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
SIZES = {"laptop": (1400, 900), "phone": (390, 844)}
NAVIGATION_ENTRIES = 25  # a list that fits on a screen
CUT_OFF = """
return [...document.querySelectorAll("pre > code")]
  .filter((code) => code.scrollWidth > code.clientWidth + 1)
  .map((code) => code.innerText.slice(0, 60))
"""

pytestmark = pytest.mark.slow  # builds the site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("needs Debian's packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ARGUMENTS:
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.mark.parametrize("size", SIZES)
def test_no_code_block_is_cut_off(site: Path, browser: Any, size: str) -> None:
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    cut_off = {}
    for page in ("", "tutorial/", "data/", "how-to/doctor/", "how-to/etcd/", "how-to/observe/"):
        browser.get((site / page / "index.html").as_uri())
        assert browser.execute_script("return document.querySelectorAll('pre > code').length")
        if blocks := browser.execute_script(CUT_OFF):
            cut_off[page] = blocks
    assert cut_off == {}


def test_sources_are_not_among_the_results_of_a_search(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = [entry["location"] for entry in index["docs"]]
    assert any(location.startswith("how-to/adopt/") for location in found)
    assert [location for location in found if location.startswith("source/")] == []


def test_the_reference_begins_with_what_a_script_calls_first(site: Path) -> None:
    page = (site / "reference" / "elastic" / "index.html").read_text()
    names = re.findall(r'<h2 id="elastic\.(\w+)"', page)
    assert names[:3] == ["join", "Run", "ElasticLoader"]


def test_the_navigation_fits_on_a_screen() -> None:
    config = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    entries = re.findall(r"^ +- .*\.md$", config.partition("\nnav:\n")[2], re.MULTILINE)
    assert 0 < len(entries) <= NAVIGATION_ENTRIES
