"""``elastic tutorial``: the tutorial's scripts, to work on."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from elastic.cli.arguments import CommandParser
from elastic.errors import ConfigError

# A link to examples/migrate/ddp_tutorial, which a wheel contains as files.
SCRIPTS = Path(__file__).parent / "scripts" / "tutorial"

NEXT = """\
# the ordinary script
torchrun --standalone --nproc-per-node=2 before.py 4 2
# on three nodes
elastic run --nodes-local 3 --embedded-etcd --nnodes 2:3 after.py 2000 100 --batch_size 2
# meanwhile, in another terminal
kill -9 $(pgrep -nf -- '-u after.py')"""


def main(argv: Sequence[str]) -> int:
    """Run ``elastic tutorial ARGV``; returns the exit code."""
    folder = Path(parser().parse_args(list(argv)).folder)
    scripts = sorted(SCRIPTS.glob("*.py"))
    present = [script for script in scripts if (folder / script.name).exists()]
    for script in present:
        target = folder / script.name
        if target.read_bytes() != script.read_bytes():
            raise ConfigError(
                f"{target} exists, and is not as it was written",
                hint="choose another folder, or remove it",
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for script in scripts:
            shutil.copyfile(script, folder / script.name)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to: {error.strerror}") from error
    names = " and ".join(script.name for script in scripts)
    done = f"{names} are there already, unchanged" if present == scripts else f"wrote {names}"
    print(f"{done}. Try, in this order:\n\ncd {folder}\n{NEXT}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line of ``elastic tutorial``."""
    own = CommandParser(
        prog="elastic tutorial",
        description="Write the tutorial's scripts: an ordinary DDP script (before.py) and the same "
        "script ported (after.py).",
    )
    own.add_argument("folder", help="where to write them; created if it does not exist")
    return own
