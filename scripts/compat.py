"""Run the project with every torch and Python it claims to work with; docs/compatibility.md.

    python scripts/compat.py                                # all environments (make compat)
    python scripts/compat.py torch-2.15.0 dependencies-oldest
    python scripts/compat.py --check demo torch-2.15.0
    python scripts/compat.py --pythons                      # Pythons (make matrix)
    python scripts/compat.py --page                         # only write the page again

A Python that is not on this machine (on PATH, or of pyenv or uv) is left out, and its row says so.
Each environment is a virtual one in a cache folder outside the tree, made on first use: PyPI's
torch brings 5 GB of CUDA libraries, which do no harm on a CPU. What is tested is the wheel built
from this tree, installed there. A run replaces the results of the environments it was asked for in
benchmarks/results/compatibility.json; the page is made of those.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "compatibility.json"
PAGE = ROOT / "docs" / "compatibility.md"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
PIP = ("-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-cache-dir")
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "psutil", "cryptography", "fsspec")
SHOWN = (
    *("torch", "grpcio", "protobuf", "etcd3", "numpy", "safetensors"),
    *("transformers", "accelerate", "lightning"),
)
INSTALLED = "installed.json"  # in an environment: the requirements, and the wheel's, that it has


@dataclass(frozen=True)
class Check:
    """Something to run in an environment. Tests by their paths; no paths: the demo."""

    name: str
    says: str
    paths: tuple[str, ...] = ()
    limit_s: float = 900.0
    marked: str = "not soak"


DEMO = Check("demo", "`elastic demo` of the installed wheel, outside of the repository")
CONTRACT = Check(
    "contract",
    "what torch's internals must be like",
    (
        "tests/contract/test_torch_private.py",
        "tests/contract/test_torch_private_names.py",
        "tests/contract/test_torch_communicators.py",
        "tests/unit/groups/test_communicators.py",
        "tests/unit/groups/test_nccl_semantics.py",
        "tests/unit/groups/test_synchronous_collectives.py",
        "tests/contract/test_torchrun_parser.py",
        "tests/unit/repository/test_imports.py",
    ),
)
GROUPS = Check(
    "process groups",
    "collectives and backward passes ended by an abort; sums of gradients",
    tuple(
        f"tests/integration/test_process_group.py::test_{name}"
        for name in (
            "an_abort_ends_the_collectives_of_a_script",
            "an_abort_ends_a_backward_pass",
            "gradients_equal_those_of_one_process",
        )
    ),
)
IN_PROCESS = Check(
    "in-process kills",
    "nodes and workers killed and added, etcd away; the same processes train on, to the weights of "
    "an undisturbed run",
    tuple(
        f"tests/kill/test_in_process.py::test_{name}"
        for name in (
            "a_joining_node_interrupts_no_step",
            "the_agent_detects_the_death_of_a_worker_immediately",
            "below_min_nodes_the_job_saves_pauses_and_resumes",
            "recovery_from_a_death_waits_for_etcd",
            "the_job_ends_with_the_weights_of_an_undisturbed_run",
        )
    ),
    limit_s=1500.0,
)
ETCD = Check(
    "etcd",
    "keys, leases and watches on one etcd and on three",
    (
        "tests/contract/test_keys.py",
        "tests/contract/test_leases.py",
        "tests/contract/test_watches.py",
    ),
)
SCRIPTS = Check(
    "everyday scripts",
    "training loops as users write them, with a death at a random line",
    ("tests/idioms/test_idioms.py",),
    limit_s=1800.0,
)
SHARDED = Check(
    "sharded models",
    "FSDP2, tensor parallelism and pipeline stages, with deaths",
    (
        "tests/idioms/test_sharded_idioms.py",
        "tests/idioms/test_rebuilding.py",
        "tests/idioms/test_pipeline_stages.py",
    ),
)
TRAINER = Check(
    "Hugging Face Trainer",
    "recovery in process inside it, with deaths",
    ("tests/integrations/test_hf_trainer.py",),
    limit_s=1800.0,
    marked="not slow and not soak",
)
LIGHTNING = Check(
    "Lightning",
    "the same",
    ("tests/integrations/test_lightning.py",),
    limit_s=1800.0,
    marked="not slow and not soak",
)
LOOPS = Check(
    "Accelerate and Fabric",
    "the same with loops of scripts",
    ("tests/integrations/test_framework_loops.py",),
    limit_s=1800.0,
    marked="not slow and not soak",
)
OF_FRAMEWORKS = (TRAINER, LIGHTNING, LOOPS)
OF_PYTHON = (DEMO, CONTRACT, GROUPS, IN_PROCESS, ETCD)
OF_TORCH = (DEMO, CONTRACT, GROUPS, IN_PROCESS, SCRIPTS, SHARDED)


@dataclass(frozen=True)
class Environment:
    """A virtual environment and what runs in it."""

    name: str
    says: str
    requirements: tuple[str, ...]  # beside the wheel and what it needs
    checks: tuple[Check, ...]
    is_constrained: bool = True  # by constraints.txt, for all but the requirements
    python: str = ""  # "3.12"; this one's own by default

    def interpreter(self) -> str | None:
        """The Python to make it with; None: not on this machine."""
        return find_python(self.python) if self.python else sys.executable


PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
ENVIRONMENTS = (
    *(
        Environment(f"torch-{version}", f"torch {version}", (f"torch=={version}",), OF_TORCH)
        for version in TORCHES
    ),
    *(
        Environment(
            f"python-{version}",
            f"Python {version}",
            ("torch==2.13.0",),
            OF_PYTHON,
            python=version,
        )
        for version in PYTHONS
    ),
    Environment(
        "dependencies-oldest",
        "the oldest grpcio, protobuf and msgspec",
        ("torch==2.13.0", "grpcio==1.49.1", "protobuf==3.20.0", "msgspec==0.19.0"),
        (DEMO, ETCD),
    ),
    Environment(
        "dependencies-newest",
        "`pip install` of the wheel into an empty environment: the newest of all but torch",
        ("torch==2.13.0",),
        (DEMO, ETCD),
        is_constrained=False,
    ),
    Environment(
        "accelerate-oldest",
        "the oldest Accelerate, without transformers, which needs a newer one",
        ("torch==2.13.0", "accelerate==1.2.0"),
        (LOOPS,),
    ),
    Environment(
        "frameworks-oldest",
        "the oldest transformers, and Lightning",
        (
            "torch==2.13.0",
            "transformers==5.5.0",
            "accelerate==1.3.0",
            "lightning==2.5.0",
            "pytorch-lightning==2.5.0",
            "fsspec<2026",  # lightning 2.5.0 demands it
        ),
        OF_FRAMEWORKS,
    ),
    Environment(
        "frameworks-newest",
        "the newest transformers, Accelerate and Lightning",
        ("torch==2.13.0", "transformers", "accelerate", "lightning", "pytorch-lightning"),
        OF_FRAMEWORKS,
    ),
)


def main() -> int:
    """Run what the command line asks for; 0 if all of it passed."""
    args = _arguments()
    if not args.page:
        cache = args.cache.expanduser()
        wanted = [e for e in ENVIRONMENTS if e.name in args.environments]
        for environment in [e for e in wanted if e.interpreter() is None]:
            say(f"{environment.name}: not on this machine")
            wanted.remove(environment)
        with tempfile.TemporaryDirectory() as folder:
            wheel = build_wheel(Path(folder))
            for environment in wanted:
                run_environment(environment, cache, wheel, args.check)
    results = json.loads(RESULTS.read_text())
    PAGE.write_text(page(results))
    wanted_names = args.environments if args.page else [environment.name for environment in wanted]
    return 0 if all(passed(results[name]) for name in wanted_names if name in results) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [environment.name for environment in ENVIRONMENTS]
    parser.add_argument("environments", nargs="*", choices=[*names, []], metavar="ENVIRONMENT")
    parser.add_argument("--check", action="append", help="only this one, e.g. demo")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    parser.add_argument("--pythons", action="store_true", help="the environments of Pythons")
    parser.add_argument("--cache", type=Path, default=CACHE / "torch-elastic-harness" / "compat")
    args = parser.parse_args()
    if args.pythons:
        args.environments = [environment.name for environment in ENVIRONMENTS if environment.python]
    args.environments = args.environments or names
    return args


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


# Environments


def find_python(version: str) -> str | None:
    """An interpreter of that version on this machine: on PATH, or one that pyenv or uv manages."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [
        f"python{version}",
        *map(str, sorted(home.glob(f"versions/{version}.*/bin/python{version}"))),
    ]
    if shutil.which("uv"):
        found = subprocess.run(["uv", "python", "find", version], capture_output=True, text=True)
        candidates += [found.stdout.strip()] if found.returncode == 0 else []
    ask = "import platform, sys; print(platform.python_version(), sys.executable)"
    for candidate in candidates:
        # A shim of pyenv is on PATH whether or not it leads to an interpreter.
        try:
            said = subprocess.run([candidate, "-c", ask], capture_output=True, text=True)
        except OSError:
            continue
        number, _, path = said.stdout.strip().partition(" ")
        if said.returncode == 0 and number.startswith(f"{version}."):
            return path
    return None


def copy_sources(into: Path) -> None:
    """All that a wheel is built of."""
    packages = [init.parent.name for init in ROOT.glob("[!.]*/__init__.py")]
    for name in (*packages, "examples"):  # the demo's script is a link to an example
        shutil.copytree(ROOT / name, into / name, symlinks=True)
    modules = [path.name for path in ROOT.glob("*.py")]
    for name in (*modules, "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, into)


def build_wheel(folder: Path) -> Path:
    """The wheel of this tree, built from a copy of it: builds leave files beside the sources."""
    with tempfile.TemporaryDirectory() as scratch:
        copy_sources(Path(scratch))
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-cache-dir"]
        subprocess.run([*command, "--wheel-dir", str(folder), "."], cwd=scratch, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def make(environment: Environment, folder: Path, wheel: Path) -> Path:
    """The environment's Python, with its requirements and the wheel as it is now."""
    python = folder / "bin" / "python"
    marker = folder / INSTALLED
    if not python.exists():
        interpreter = environment.interpreter()
        assert interpreter is not None, environment.python
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    extra = f"torch-elastic-harness[demo] @ {wheel.as_uri()}"
    wanted = [*environment.requirements, *TOOLS]
    needed = [*wanted, *requirements_of(wheel)]
    if not marker.exists() or json.loads(marker.read_text()) != needed:
        constraints = _constraints(environment, folder)
        subprocess.run([python, *PIP, *constraints, *wanted, extra], check=True)
        marker.write_text(json.dumps(needed))
    reinstall = ("--no-deps", "--force-reinstall", str(wheel))
    subprocess.run([python, *PIP, *reinstall], check=True)
    return python


def requirements_of(wheel: Path) -> list[str]:
    """What the wheel needs, its extras included."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    return [line for line in lines if line.startswith("Requires-Dist:")]


def _constraints(environment: Environment, folder: Path) -> list[str]:
    if not environment.is_constrained:
        return []
    own = {re.split("[=<>]", requirement)[0] for requirement in environment.requirements}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if re.split("[=<>;]", line)[0] not in own]
    path = folder / "constraints.txt"
    path.write_text("\n".join(kept))
    return ["--constraint", str(path)]


def versions_in(python: Path) -> dict[str, str]:
    """What is installed there of the packages that matter."""
    code = (
        "import json, platform; from importlib.metadata import distributions; "
        "all = {each.name: each.version for each in distributions()}; print(json.dumps("
        f"{{'python': platform.python_version(), **{{n: all[n] for n in {SHOWN} if n in all}}}}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


# Checks


def run_environment(
    environment: Environment, cache: Path, wheel: Path, only: list[str] | None
) -> None:
    """Run its checks and put the results into the file."""
    folder = cache / environment.name
    folder.mkdir(parents=True, exist_ok=True)
    say(f"{environment.name}: {folder}")
    python = make(environment, folder, wheel)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    before = results.get(environment.name, {}).get("checks", {}) if only else {}
    checks = {name: old for name, old in before.items() if name not in (only or ())}
    for check in environment.checks:
        if only is not None and check.name not in only:
            continue
        checks[check.name] = run_check(check, python, cache / "logs" / environment.name)
        say(f"  {check.name}: {checks[check.name]}")
        results[environment.name] = {
            "date": time.strftime("%Y-%m-%d"),
            "versions": versions_in(python),
            "system": f"{platform.system()} {platform.machine()}",
            "checks": checks,
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")  # what follows may be interrupted


def run_check(check: Check, python: Path, logs: Path) -> dict[str, Any]:
    """Its result and seconds; the output goes to a file of the check's name."""
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{check.name.replace(' ', '-')}.log"
    own = {k: v for k, v in os.environ.items() if not k.startswith(("ELASTIC_", "PET_", "PYTHON"))}
    own["PATH"] = f"{python.parent}{os.pathsep}{own['PATH']}"
    own["PYTHONSAFEPATH"] = "1"  # the wheel, and not what lies in the working directory
    missing = [path for path in check.paths if not (ROOT / path.partition("::")[0]).exists()]
    assert not missing, missing
    options = ("-q", "-p", "no:cacheprovider", "-m", check.marked)
    command = [str(python), "-m", "pytest", *options, *check.paths]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, log.open("w") as output:
        if not check.paths:
            command = [str(python.parent / "elastic"), "demo", "-o", "json"]
        try:
            code = subprocess.run(
                command,
                cwd=ROOT if check.paths else scratch,
                env=own,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=check.limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    found = re.findall(r"(\d+) (passed|failed|errors?|skipped)", _summary(log))
    counts = {what.replace("passed", "tests"): int(number) for number, what in found}
    return {
        "passed": code == 0,
        "seconds": round(time.monotonic() - begun),
        **(counts if check.paths else {}),
    }


def _summary(log: Path) -> str:
    """pytest's last line. (Torch 2.15 prints others after it, as the process ends.)"""
    lines = log.read_text(errors="replace").splitlines()
    summaries = (line for line in reversed(lines) if re.search(r"\d+ \w+.* in [\d.]+s", line))
    return next(summaries, "")


# The page


def passed(result: dict[str, Any]) -> bool:
    """Whether all checks of an environment did."""
    return bool(result["checks"]) and all(check["passed"] for check in result["checks"].values())


def page(results: dict[str, Any]) -> str:
    """docs/compatibility.md."""
    rows = [_row(environment, results.get(environment.name)) for environment in ENVIRONMENTS]
    checks = {check.name: check for e in ENVIRONMENTS for check in e.checks}
    columns = "".join(f" {name} |" for name in checks)
    return "\n".join(
        [
            "# Compatibility",
            "",
            "Written by `make compat` (`scripts/compat.py`); do not edit. Every row is an "
            "environment of its own, with the wheel built from this tree. PyPI's CUDA builds of "
            "torch run on a CPU. A number: so many tests passed.",
            "",
            *(
                f"- **{check.name}**: {check.says}"
                + (f" (`{'`, `'.join(_files(check))}`)." if check.paths else ".")
                for check in checks.values()
            ),
            "",
            f"| environment |{columns} versions | run on |",
            f"|---|{'---|' * len(checks)}---|---|",
            *rows,
            "",
            "torch's bounds in `pyproject.toml` are the versions in this table. torch 2.15 needs "
            "Python 3.11: on 3.10, `pip install` takes 2.14. grpcio has wheels from 1.49.1 on for "
            "Python 3.11, 1.59 for 3.12, 1.66.2 for 3.13 and 1.75.1 for 3.14.",
            "",
        ]
    )


def _files(check: Check) -> list[str]:
    return list(dict.fromkeys(path.partition("::")[0] for path in check.paths))


def _row(environment: Environment, result: dict[str, Any] | None) -> str:
    names = dict.fromkeys(check.name for e in ENVIRONMENTS for check in e.checks)
    if result is None:
        return f"| {environment.says} |{' not run |' * len(names)} | |"
    own = {check.name for check in environment.checks}
    cells = [_cell(result["checks"].get(name), name in own) for name in names]
    shown = ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    return f"| {environment.says} | {' | '.join(cells)} | {shown} | {result['date']} |"


def _cell(check: dict[str, Any] | None, is_own: bool) -> str:
    if check is None:
        return "not run" if is_own else ""
    failed = f", {check['failed']} failed" if "failed" in check else ""
    passed = str(check.get("tests", "passed")) if check["passed"] else "**FAILED**"
    return f"{passed}{failed}"


if __name__ == "__main__":
    sys.exit(main())
