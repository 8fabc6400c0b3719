"""docs/compatibility.md and the version bounds match the results of `make compat`."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from elastic import torch_private

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def compat() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compat", REPOSITORY / "scripts" / "compat.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(compat: ModuleType) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(compat.RESULTS.read_text())
    return found


def test_the_page_is_written_from_the_results(compat: ModuleType, results: dict[str, Any]) -> None:
    assert compat.PAGE.read_text() == compat.page(results), "python scripts/compat.py --page"


@pytest.mark.parametrize("minor", [torch_private.OLDEST, torch_private.NEWEST])
def test_the_oldest_and_newest_supported_torch_were_tested(
    minor: str, compat: ModuleType, results: dict[str, Any]
) -> None:
    (environment,) = (e for e in compat.ENVIRONMENTS if e.name.startswith(f"torch-{minor}."))
    result = results[environment.name]
    assert compat.passed(result)
    assert {compat.DEMO.name, compat.CONTRACT.name} <= set(result["checks"])
    assert result["versions"]["torch"].startswith(f"{minor}.")


def test_every_environment_has_results(compat: ModuleType, results: dict[str, Any]) -> None:
    """Except for other Python versions, which not every machine has."""
    for environment in compat.ENVIRONMENTS:
        if environment.python and environment.name not in results:
            continue
        result = results[environment.name]
        assert set(result["checks"]) == {check.name for check in environment.checks}
        assert compat.passed(result), environment.name


def test_every_supported_torch_version_has_an_environment(compat: ModuleType) -> None:
    minors = {".".join(version.split(".")[:2]) for version in compat.TORCHES}
    major, oldest = map(int, torch_private.OLDEST.split("."))
    newest = int(torch_private.NEWEST.split(".")[1])
    assert minors == {f"{major}.{minor}" for minor in range(oldest, newest + 1)}


@pytest.mark.parametrize("kind", ["dependencies", "accelerate", "frameworks"])
def test_the_oldest_versions_are_the_lower_bounds(compat: ModuleType, kind: str) -> None:
    (environment,) = (e for e in compat.ENVIRONMENTS if e.name == f"{kind}-oldest")
    packaging = (REPOSITORY / "pyproject.toml").read_text()
    for requirement in environment.requirements:
        name, exact, version = requirement.partition("==")
        if exact and name not in ("torch", "pytorch-lightning"):
            assert f'"{name}>={version}' in packaging or f'"{name}>={version[:-2]}"' in packaging


def test_a_failed_check_is_shown_as_such(compat: ModuleType) -> None:
    name = compat.ENVIRONMENTS[0].name
    checks = {"demo": {"passed": False, "seconds": 3}}
    broken = {name: {"checks": checks, "versions": {"torch": "2.11.0"}, "date": "2026-01-01"}}
    assert not compat.passed(broken[name])
    row = next(line for line in compat.page(broken).splitlines() if line.startswith("| torch 2.11"))
    assert "**FAILED**" in row and "not run" in row


def test_every_supported_python_has_an_environment(compat: ModuleType) -> None:
    packaging = (REPOSITORY / "pyproject.toml").read_text()
    oldest = re.search(r'requires-python = ">=(3\.\d+)"', packaging)
    assert oldest is not None and compat.PYTHONS[0] == oldest[1]
    offered = set(re.findall(r"Programming Language :: Python :: (3\.\d+)", packaging))
    assert offered <= set(compat.PYTHONS)
    assert {e.python for e in compat.ENVIRONMENTS if e.python} == set(compat.PYTHONS)


def test_an_interpreter_is_found_by_its_version(compat: ModuleType) -> None:
    own = ".".join(map(str, sys.version_info[:2]))
    found = compat.find_python(own)
    ask = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    assert subprocess.run([found, "-c", ask], capture_output=True, text=True).stdout.strip() == own
    assert compat.find_python("3.99") is None


def test_the_wheel_has_the_module_that_torch_loads(compat: ModuleType, tmp_path: Path) -> None:
    compat.copy_sources(tmp_path)  # without it, no environment can import torch
    assert [path.name for path in tmp_path.glob("*.py")] == ["torch_elastic_harness.py"]


def test_requirements_are_read_from_the_wheel(compat: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "a-1.dist-info/METADATA", "Name: a\nRequires-Dist: msgspec>=0.19\n\nText\n"
        )
    assert compat.requirements_of(wheel) == ["Requires-Dist: msgspec>=0.19"]
