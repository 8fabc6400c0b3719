"""The command line of every script that a Workload starts."""

from __future__ import annotations

import argparse
from pathlib import Path

from kit.shared_gpu import share_if_told


def job_parser() -> argparse.ArgumentParser:
    """A parser with the arguments that a Workload passes to every script; a script adds its own."""
    share_if_told()  # scripts call this before they use a device
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--save-every", type=int, required=True)
    return parser
