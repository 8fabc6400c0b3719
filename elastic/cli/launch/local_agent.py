"""One agent of ``elastic run --nodes-local``; its flags come as JSON, its one argument.

The flags were parsed and checked by the parent; they are passed as JSON rather than as arguments,
so that both sides run with the same values.
"""

from __future__ import annotations

import argparse
import json
import sys

from elastic.cli.launch.run import run_agent


def main(argv: list[str]) -> int:
    """Be the agent; returns its exit code."""
    args = argparse.Namespace(**json.loads(argv[0]))
    # As if torchrun had been called with them: the handler searches them for folders.
    sys.argv[1:] = [args.training_script, *args.training_script_args]
    return run_agent(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
