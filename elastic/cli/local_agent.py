"""One agent of ``elastic run --nodes-local``: its flags as JSON, and the file for its last error.

The parent has parsed and checked the flags and passes them as JSON rather than as arguments,
so that both sides run with the same values. It prints the error of each agent, those that are
equal once.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from elastic.cli.run import run_agent
from elastic.telemetry.log import get_logger


def main(argv: list[str]) -> int:
    """Run the agent; returns its exit code."""
    args = argparse.Namespace(**json.loads(argv[0]))
    # Mimic a call of torchrun: the handler searches sys.argv for folders.
    sys.argv[1:] = [args.training_script, *args.training_script_args]
    for handler in get_logger().handlers:
        handler.addFilter(lambda record: not getattr(record, "is_last_error", False))
    return run_agent(args, Path(argv[1]).write_text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
