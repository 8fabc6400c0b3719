"""One agent of ``elastic run --nodes-local``: its flags as JSON, and the file for its last error.

The parent has parsed and checked the flags and passes them as JSON rather than as arguments,
so that both sides run with the same values. It prints the error of each agent, those that are
equal once.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    """Run the agent; returns its exit code."""
    is_handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_handled:  # nothing is to be undone while it imports: Ctrl-C needs no traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    import torch.distributed.run  # noqa: F401 (its import takes longest)

    from elastic.cli.run import LastErrors, run_agent
    from elastic.telemetry.log import get_logger

    if is_handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    args = argparse.Namespace(**json.loads(argv[0]))
    # Mimic a call of torchrun: the handler searches sys.argv for folders.
    sys.argv[1:] = [args.training_script, *args.training_script_args]
    for handler in get_logger().handlers:
        handler.addFilter(lambda record: not getattr(record, "is_last_error", False))
    own = Path(argv[1])
    code, _ = run_agent(args, lambda error: LastErrors(own.parent).record(own.name, error))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
