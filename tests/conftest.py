"""Fixtures that several rooms of tests share, each in a file named by its concept."""

from __future__ import annotations

import gc
import hashlib
import os
import re
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Time says nothing about an example on a machine that other tests use, too. Every run draws the
# same examples, so that a change is judged by what it changes; `make soak` draws many, and others
# each time: pytest --hypothesis-profile=soak.
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    max_examples=50,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "soak", settings.get_profile("tests"), derandomize=False, max_examples=2000
)
settings.load_profile("tests")

pytest_plugins = ["etcd_fixtures"]

# Files of a minute and more, most of it waiting.
LONGEST = (
    "test_hangs.py",
    "test_injected_hangs.py",
    "test_deaths_in_replicas.py",
    "test_building_in_worlds.py",
    "test_cli_demo_real.py",
    "test_in_process_phases.py",
    "test_pod_lifecycle.py",
    "test_network_faults.py",
    "test_deaths.py",
    "test_in_process.py",
    "test_mixed_nodes.py",
    "test_cli_run.py",
    "test_cut_from_etcd.py",
    "test_save_matrix.py",
    "test_in_process_on_streams.py",
    "test_etcd_outages.py",
    "test_frozen_agents.py",
    "test_siblings.py",
    "test_partitions.py",
)

# Folders whose tests mostly wait, for clusters, processes and timeouts: while others have work for
# the cores. Then the one with the longest file that computes all the time.
FIRST = ("kill", "integration", "security", "contract", "idioms")

# A file all of whose tests start clusters.
ALL_OF_CLUSTERS = re.compile(r"^pytestmark = (\[[^]]*)?pytest\.mark\.cluster\b", re.MULTILINE)

# Modules whose objects the garbage collector leaves alone, and how many new ones are worth a look;
# or how many objects are, if a test has had the collector look at all of them again.
MODULES_WORTH_FREEZING = 100
OBJECTS_WORTH_FREEZING = 200_000
_frozen_modules: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", metavar="SEED", help="run the files, and the tests of each, in a random order"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test that ``-m "cluster ..."``, or ``-m "not cluster ..."``, asks for are not
    read: importing all of them, and what they import, takes each of several processes seconds of
    CPU time."""
    if not (collection_path.name.startswith("test_") and collection_path.is_file()):
        return None
    wanted = str(config.option.markexpr)
    if wanted.startswith("cluster"):
        return True if "mark.cluster" not in collection_path.read_text() else None
    if "not cluster" in wanted:
        return True if ALL_OF_CLUSTERS.search(collection_path.read_text()) else None
    return None


def pytest_pycollect_makeitem(
    collector: pytest.Collector, name: str, obj: object
) -> list[pytest.Item] | None:
    """For ``-m "not soak ..."``, no test of the soak is made: they have thousands of parameters."""
    if "not soak" not in str(collector.config.option.markexpr) or not name.startswith("test_"):
        return None
    is_soak = any(mark.name == "soak" for mark in getattr(obj, "pytestmark", ()))
    return [] if is_soak else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Of several processes, each begins with other files: pytest rewrites the assertions of a file
    for whichever comes first, and the others find that. All at once with the same file, each would
    do it: a third of what collecting takes."""
    report = yield
    if isinstance(collector, pytest.Directory) and report.result:
        number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        first = number * len(report.result) // count
        report.result = [*report.result[first:], *report.result[:first]]
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    """Long files first, so that with several at a time nobody waits long for the last one: the
    LONGEST, then the folders that come FIRST, each from the end of the alphabet, which has workers,
    processes and command lines there."""
    # Whichever file was collected first, or pytest's order by parameters would depend on it.
    items.sort(key=lambda item: str(item.path))
    yield
    seed = config.getoption("--shuffle")
    if seed is not None:
        # Not random.shuffle: a test keeps its place whichever others are selected.
        items.sort(key=lambda item: _digest(f"{seed} {item.nodeid}"))
        items.sort(key=lambda item: _digest(f"{seed} {item.path}"))  # a file's fixtures stay up
        return
    items.sort(key=lambda item: str(item.path), reverse=True)
    items.sort(key=lambda item: (*FIRST, item.path.parent.name).index(item.path.parent.name))
    items.sort(key=lambda item: (*LONGEST, item.path.name).index(item.path.name))


@pytest.fixture(autouse=True, scope="module")
def _imports_are_no_garbage() -> Iterator[None]:
    """What was imported before a file's tests is left out of what the garbage collector goes
    through in them.

    Everything that torch, pytest and Hypothesis have made by then is a million objects or more.
    Each full collection, and each ``gc.get_referrers`` of a training loop that begins, goes
    through all of them, for a tenth of a second: a third of the CPU time of files that train much.
    """
    are_new = len(sys.modules) - len(_frozen_modules) > MODULES_WORTH_FREEZING
    # Not gc.get_freeze_count(), which counts them, one by one, for 0.04 s of CPU time.
    if are_new or len(gc.get_objects(generation=2)) > OBJECTS_WORTH_FREEZING:
        _frozen_modules.update(sys.modules)
        gc.collect()
        gc.freeze()
    yield


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
