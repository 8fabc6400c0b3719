"""One agent of ``elastic run --nodes-local``; its only argument is its flags as JSON.

The parent has parsed and checked the flags and passes them as JSON rather than as arguments,
so that both sides run with the same values.
"""

from __future__ import annotations

import argparse
import json
import sys

from elastic.cli.run import run_agent


def main(argv: list[str]) -> int:
    """Run the agent; returns its exit code."""
    args = argparse.Namespace(**json.loads(argv[0]))
    # Mimic a call of torchrun: the handler searches sys.argv for folders.
    sys.argv[1:] = [args.training_script, *args.training_script_args]
    return run_agent(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
