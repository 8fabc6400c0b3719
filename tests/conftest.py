"""Fixtures shared by several test folders, each in a file named by its concept."""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from kit import shared_gpu

# No deadline: durations vary on a machine that runs other tests, too. Every run draws the same
# examples, so that a failure is due to a change; `make soak` draws many different ones each time
# (pytest --hypothesis-profile=soak).
settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    max_examples=25,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "soak", settings.get_profile("tests"), derandomize=False, max_examples=2000
)
settings.load_profile("tests")
# Hypothesis also draws the numbers and texts that it finds in the source of imported modules: which
# examples a test gets would depend on the tests that ran before it in the same process.
assert hasattr(providers, "_get_local_constants")
NO_CONSTANTS = Constants()

pytest_plugins = ["etcd_fixtures"]

# Files that take a minute or more, mostly waiting.
LONGEST = (
    "test_leaving_matrix.py",
    "test_in_process.py",
    "test_hangs.py",
    "test_checkpoints_in_training.py",
    "test_pod_lifecycle.py",
    "test_checkpoint_sharded.py",
    "test_worker_api.py",
    "test_cut_from_etcd.py",
    "test_deaths.py",
    "test_cli_run.py",
    "test_process_group.py",
    "test_in_process_phases.py",
    "test_last_checkpoints.py",
    "test_etcd_outages.py",
    "test_siblings.py",
    # In `make test-all` only, or most of their tests.
    "test_injected_hangs.py",
    "test_deaths_in_replicas.py",
    "test_in_process_on_streams.py",
    "test_building_in_worlds.py",
    "test_cli_demo_real.py",
    "test_network_faults.py",
    "test_mixed_nodes.py",
    "test_save_matrix.py",
    "test_frozen_agents.py",
    "test_partitions.py",
)

# Folders whose tests mostly wait, and those with the longest files that compute: the Makefile runs
# both kinds at a time.
FIRST = ("kill", "integration", "security", "contract", "idioms", "integrations", "generator")

# Files in which all tests are slow.
ALL_SLOW = re.compile(r"^pytestmark = (\[[^]]*)?pytest\.mark\.slow\b", re.MULTILINE)
# Marks of tests that are not even collected without them: some have thousands of parameters.
OMITTED = ("soak", "slow")

# Objects are frozen again after this many new modules, or if the collector tracks this many objects
# because a test has unfrozen them.
MODULES_WORTH_FREEZING = 100
OBJECTS_WORTH_FREEZING = 200_000
_frozen_modules: set[str] = set()
_tests = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle", metavar="SEED", help="run the files, and the tests of each, in a random order"
    )


@pytest.fixture(autouse=True)
def state_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs register in a folder of the test's own, and write journals there: none knows of the
    jobs of other tests."""
    folder = f"{tempfile.gettempdir()}/state-{os.getpid()}-{next(_tests)}"
    monkeypatch.setenv("XDG_STATE_HOME", folder)


def pytest_configure(config: pytest.Config) -> None:
    _share_the_kit()
    if config.getoption("--hypothesis-profile") is None:
        providers._get_local_constants = lambda: NO_CONSTANTS
    _hide_gpus(config)
    if not hasattr(config, "workerinput"):  # not in a process of xdist, which inherits it
        _use_own_temporary_folder(config)


def _share_the_kit() -> None:
    """Let every process that a test starts import :mod:`kit`."""
    own, folders = str(Path(__file__).parent), os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if own not in folders:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [own, *folders]))


def _use_own_temporary_folder(config: pytest.Config) -> None:
    """Remove temporary files with the run: killed processes leave thousands of folders, and
    torchrun leaves one in each of its runs. pytest's own folders (``tmp_path``) stay where they
    are."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    before = os.environ.get("TMPDIR")
    folder = tempfile.mkdtemp(prefix="tests-")
    os.chmod(folder, 0o1777)  # as /tmp: some tests become another user
    os.environ["TMPDIR"] = tempfile.tempdir = folder

    def remove() -> None:
        tempfile.tempdir = before
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        shutil.rmtree(folder, ignore_errors=True)

    config.add_cleanup(remove)


def _hide_gpus(config: pytest.Config) -> None:
    """Hide GPUs from tests that are not about them: their scripts use the CPU.

    Otherwise all ranks of a machine would take its first GPUs, which NCCL refuses to share.
    """
    is_about_gpus = re.search(r"(?<!not )\bgpu\b", str(config.option.markexpr))
    if not is_about_gpus and os.environ.get(shared_gpu.SWITCH) != "1":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files without a test that ``-m "not slow ..."`` selects: importing all files takes
    seconds of CPU time in each process."""
    is_test = collection_path.is_file() and collection_path.name.startswith("test_")
    if not is_test or "not slow" not in str(config.option.markexpr):
        return None
    return True if ALL_SLOW.search(collection_path.read_text()) else None


def pytest_pycollect_makeitem(
    collector: pytest.Collector, name: str, obj: object
) -> list[pytest.Item] | None:
    """For ``-m "not soak ..."`` and ``-m "not slow ..."``, skip these tests early."""
    if not name.startswith("test_"):
        return None
    wanted = str(collector.config.option.markexpr)
    omitted = {mark for mark in OMITTED if f"not {mark}" in wanted}
    marks = {mark.name for mark in getattr(obj, "pytestmark", ())}
    return [] if omitted & marks else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Have each of several processes begin its collection with other files.

    pytest rewrites the assertions of a file in the first process that imports it, and the others
    use the result. If all began with the same file, each would rewrite it: a third of the time of
    a collection.
    """
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
    """Run long files first, so that parallel processes finish together: the LONGEST, then the
    folders in FIRST, each in reverse alphabetical order (workers, processes, command lines)."""
    # The order of collection differs between processes, and pytest's order by parameters depends
    # on it.
    items.sort(key=lambda item: str(item.path))
    yield
    seed = config.getoption("--shuffle")
    if seed is not None:
        # Not random.shuffle: a test keeps its place when other tests are deselected.
        items.sort(key=lambda item: _digest(f"{seed} {item.nodeid}"))
        items.sort(key=lambda item: _digest(f"{seed} {item.path}"))  # keeps a file together
        return
    items.sort(key=lambda item: str(item.path), reverse=True)
    items.sort(key=lambda item: (*FIRST, item.path.parent.name).index(item.path.parent.name))
    items.sort(key=lambda item: (*LONGEST, item.path.name).index(item.path.name))


@pytest.fixture(autouse=True, scope="module")
def _torch_computes_on_one_thread() -> None:
    """OpenMP threads wait for each other in busy loops: on cores that other tests use, too, that
    doubles the processor time of small models."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _imports_are_no_garbage() -> Iterator[None]:
    """Exclude objects that were imported before a file's tests from garbage collection.

    torch, pytest and Hypothesis create a million objects or more. Each full collection, and each
    ``gc.get_referrers`` at the start of a training loop, traverses all of them for a tenth of a
    second: a third of the CPU time of files that train much.
    """
    are_new = len(sys.modules) - len(_frozen_modules) > MODULES_WORTH_FREEZING
    # Not gc.get_freeze_count(), which takes 0.04 s of CPU time to count them.
    if are_new or len(gc.get_objects(generation=2)) > OBJECTS_WORTH_FREEZING:
        _frozen_modules.update(sys.modules)
        gc.collect()
        gc.freeze()
    yield


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
