"""The image, as far as it can be built and run without Docker."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from dockerfile import Dockerfile
from manifests import DEPLOY

REPOSITORY = DEPLOY.parent
FINAL = ("cpu", "cuda", "example")
OFFLINE = ("NewConnectionError", "Temporary failure in name resolution", "Network is unreachable")


@pytest.fixture(scope="module")
def image() -> Dockerfile:
    return Dockerfile(DEPLOY / "Dockerfile")


def test_base_images_are_pinned_to_exact_versions(image: Dockerfile) -> None:
    for stage in image.stages.values():
        if stage.base not in image.stages:
            assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+-[\w-]+", stage.base), stage.base


@pytest.mark.parametrize("target", FINAL)
def test_images_run_as_an_unprivileged_user(image: Dockerfile, target: str) -> None:
    assert image.effective(target, "USER") == "10001:10001", "runAsNonRoot needs a number"
    assert image.environment(target)["HOME"] == "/tmp", "the only place it may write to"


@pytest.mark.parametrize("target", FINAL)
def test_the_entrypoint_is_not_a_shell(image: Dockerfile, target: str) -> None:
    words = image.entrypoint(target)
    assert words[0].endswith("/dumb-init")
    assert "--single-child" in words, "workers would get SIGTERM before their agent has said so"
    assert words[-1] == "/opt/venv/bin/elastic"
    assert image.effective(target, "CMD").startswith("[")


def test_the_images_contain_the_tested_version_of_torch(image: Dockerfile) -> None:
    constraints = (REPOSITORY / "constraints.txt").read_text()
    (pinned,) = re.findall(r"^torch==(\S+)$", constraints, flags=re.MULTILINE)
    assert image.effective("venv-cpu", "ARG").startswith("PIP_EXTRA_INDEX_URL=")
    assert f"TORCH={pinned}+cpu" in image.stages["venv-cpu"].all("ARG")
    assert f"TORCH={pinned}" in image.stages["venv-cuda"].all("ARG")


def test_copied_files_exist_and_are_not_ignored(image: Dockerfile) -> None:
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for stage in image.stages.values():
        for text in stage.all("COPY"):
            if text.startswith("--from="):
                assert text.split()[0].removeprefix("--from=") in image.stages
                continue
            for source in text.split()[:-1]:
                assert (REPOSITORY / source).exists(), source
                assert f"!{source.split('/')[0]}" in ignore, source


def test_the_steps_of_the_cpu_image_resolve(image: Dockerfile, tmp_path: Path) -> None:
    """The wheel is built from the copied files, and its dependencies meet the constraints."""
    wheel, install = steps(image, tmp_path)
    run(wheel, tmp_path)
    (built,) = (tmp_path / "wheels").iterdir()
    files = set(zipfile.ZipFile(built).namelist())
    assert {
        "elastic/py.typed",
        "elastic/cli/main.py",
        "checkpoints/manifest.schema.json",
        "torch_elastic_harness.py",
    } <= files
    run(install, tmp_path)


@pytest.mark.soak
def test_the_steps_of_the_cpu_image_resolve_in_a_clean_environment(
    image: Dockerfile, tmp_path: Path
) -> None:
    """The same without the packages installed here: pip resolves every package from the index."""
    wheel, install = steps(image, tmp_path)
    run(wheel, tmp_path)
    run(install + " --ignore-installed", tmp_path)


def steps(image: Dockerfile, folder: Path) -> tuple[str, str]:
    """Lay out the build context like COPY; returns the RUN steps that use it. The last one requires
    everything that the previous ones do.
    """
    (folder / "src").mkdir()
    for name in ("build", "wheel"):
        for text in image.stages[name].all("COPY"):
            for source in text.split()[:-1]:
                copy(REPOSITORY / source, folder / "src" / source)
    (wheel,) = image.stages["wheel"].all("RUN")
    return wheel, image.stages["venv-cpu"].all("RUN")[-1] + " dumb-init scikit-learn"


def run(command: str, folder: Path) -> None:
    """A RUN step with this Python's pip, resolving only; torch is the installed variant."""
    pip = f"{sys.executable} -m pip"
    for old, new in (
        ("/wheels", str(folder / "wheels")),
        ("/opt/venv/bin/pip install", f"{pip} install --dry-run --quiet"),
        ("/opt/venv/bin/pip wheel", f"{pip} wheel --no-build-isolation --quiet"),
    ):
        command = command.replace(old, new)
    done = subprocess.run(
        ["sh", "-euc", command],
        cwd=folder / "src",
        env={**os.environ, "TORCH": importlib.metadata.version("torch"), "PIP_NO_INPUT": "1"},
        capture_output=True,
        text=True,
    )
    if any(sign in done.stderr for sign in OFFLINE):
        pytest.skip("no package index can be reached from here")
    assert done.returncode == 0, f"{command}\n{done.stderr}"


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy2(source, target)
