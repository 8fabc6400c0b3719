"""What `python -m build` would upload: a source distribution to test, and a wheel to install."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PACKAGES = tuple(sorted(init.parent.name for init in REPOSITORY.glob("[!.]*/__init__.py")))
FOLDERS = (*PACKAGES, "benchmarks", "deploy", "docs", "examples", "scripts", "tests")
FILES = (
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "MANIFEST.in",
    "README.md",
    "SECURITY.md",
    "constraints.txt",
    "mkdocs.yml",
    "pyproject.toml",
    "torch_elastic_harness.py",
)
NO_SOURCES = shutil.ignore_patterns("__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
BUILD = "import sys; from setuptools import build_meta; build_meta.{}(sys.argv[1])"


def build(what: str, source: Path, into: Path) -> Path:
    into.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(what), str(into)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, because builds leave files in the source tree."""
    copy = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        # Keep symlinks: one of them points to a file of another folder.
        shutil.copytree(REPOSITORY / folder, copy / folder, ignore=NO_SOURCES, symlinks=True)
    for file in FILES:
        shutil.copy(REPOSITORY / file, copy / file)
    return copy


@pytest.fixture(scope="module")
def unpacked(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution, as downloaded from PyPI."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(build("build_sdist", source, folder / "sdist")) as archive:
        archive.extractall(folder, filter="data")
    (root,) = (path for path in folder.iterdir() if path.name != "sdist")
    return root


def files_of(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_the_source_distribution_has_every_file(source: Path, unpacked: Path) -> None:
    assert files_of(source) - files_of(unpacked) == set()
    added = {name for name in files_of(unpacked) - files_of(source) if ".egg-info/" not in name}
    manifests = {name for name in added if name.startswith("elastic/cli/manifests/")}
    assert manifests == {
        f"elastic/cli/manifests/{name}"
        for name in files_of(source / "deploy")
        if name.endswith((".yaml", ".json", ".env"))
    }, "a link in the source"
    tutorial = {f"elastic/cli/scripts/tutorial/{name}" for name in ("before.py", "after.py")}
    assert tutorial <= added, "a link, too"
    assert added - manifests - tutorial <= {"PKG-INFO", "setup.cfg"}
    script = unpacked / "elastic" / "cli" / "scripts" / "digits.py"
    assert "elastic.join" in script.read_text()


def test_the_wheel_has_only_the_packages_with_their_data(unpacked: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build("build_wheel", unpacked, tmp_path / "wheel")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        name
        for name in files_of(unpacked)
        if name.startswith(tuple(f"{package}/" for package in PACKAGES))
        and (name.endswith((".py", "py.typed", ".json", ".yaml", ".env")) or "/templates/" in name)
    }
    assert names == expected | {"torch_elastic_harness.py"}
    assert {"elastic", "checkpoints"} <= set(PACKAGES)
    scripts = ("digits.py", "tutorial/before.py", "tutorial/after.py")
    assert {f"elastic/cli/scripts/{name}" for name in scripts} <= names
