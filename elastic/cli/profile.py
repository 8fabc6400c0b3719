"""``elastic profile``: record traces of a running job's next steps.

The request goes through etcd to the agents, and over their links to the workers, which begin at
their next step. It is a key on this command's lease, so it disappears when the command ends.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence

from elastic.cli.arguments import CommandParser, add_job_arguments
from elastic.cli.view import job_store, keys_of
from elastic.errors import SYSTEM_CLOCK, Clock, ConfigError, JobFailed
from elastic.membership.progress import decode_progress
from elastic.membership.records import Done, Keys, Profile, WorldRecord, decode, encode
from elastic.store.keyvalue import KeyValue
from elastic.telemetry.log import printable

# `elastic profile` keeps its request for this long: by then all watching agents have received it.
PROFILE_REQUEST_S = 3.0
# The shortest lease of that request, which removes it if the command is killed: longer than one
# call.
PROFILE_LEASE_S = 10.0

_RANKS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_MAX_RANKS = 100_000
_MAX_STEPS = 10_000


def main(argv: Sequence[str]) -> int:
    """Run ``elastic profile ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    if not 1 <= args.steps <= _MAX_STEPS:
        raise ConfigError(f"--steps={args.steps}", hint=f"give 1 to {_MAX_STEPS}")
    request = Profile(steps=args.steps, ranks=ranks_of(args.ranks))
    keys = keys_of(args)
    with job_store(args) as store:
        print(request_profile(store, keys, request))
    return 0


def ranks_of(text: str) -> tuple[int, ...]:
    """``0,4-7`` as (0, 4, 5, 6, 7). Raises ConfigError.

    >>> ranks_of("0,4-7")
    (0, 4, 5, 6, 7)
    """
    ranks: set[int] = set()
    for part in text.split(",") if text else ():
        match = _RANKS.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"--ranks={printable(text)}", hint="for example --ranks=0,4-7")
        ranks |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    if len(ranks) > _MAX_RANKS:
        raise ConfigError(f"--ranks={printable(text)}: {len(ranks)} ranks", hint="omit it")
    return tuple(sorted(ranks))


def request_profile(
    store: KeyValue,
    keys: Keys,
    request: Profile,
    *,
    held_s: float = PROFILE_REQUEST_S,
    clock: Clock = SYSTEM_CLOCK,
) -> str:
    """Write the request, withdraw it once all agents have read it, and describe the result.

    Raises JobFailed if the job has ended, and ConfigError if it is not training or if agents have
    no link to their workers.
    """
    world = _training_world(store, keys)
    if beyond := [rank for rank in request.ranks if rank >= world.size]:
        raise ConfigError(
            f"there is no rank {beyond[0]} in generation {world.generation}",
            hint=f"its ranks are 0 to {world.size - 1}",
        )
    lease = store.lease(max(PROFILE_LEASE_S, 2 * held_s))
    try:
        store.put(keys.profile, encode(request), lease=lease)
        clock.sleep(held_s)
    finally:
        lease.close()
    number = len(request.ranks) or world.size
    steps = "step" if request.steps == 1 else f"{request.steps} steps"
    ranks = "1 rank" if number == 1 else f"{number} ranks"
    return (
        f"requested traces of the next {steps} from {ranks} of generation {world.generation}: each "
        "node writes gGENERATION-stepSTEP-rankRANK.pt.trace.json into "
        "`profiles` in the folder of ELASTIC_JOURNAL, without one in its working directory"
        f"{_warning(store, keys)}"
    )


def _warning(store: KeyValue, keys: Keys) -> str:
    """A warning if no worker has a link to its agent: the request would fail silently."""
    entry = store.get(keys.progress)
    heartbeats = decode_progress(entry.key, entry.value).heartbeats if entry is not None else ()
    if any(heartbeat.has_joined for heartbeat in heartbeats):
        return ""
    return (
        "\nno node has reported a worker that has called elastic.join(): in scripts that do not, "
        "the request has no effect"
    )


def _training_world(store: KeyValue, keys: Keys) -> WorldRecord:
    if (entry := store.get(keys.done)) is not None:
        done = decode(Done, entry.key, entry.value)
        raise JobFailed(f"the job {printable(keys.run_id)} has ended: {printable(done.reason)}")
    entry = store.get(keys.world)
    world = decode(WorldRecord, entry.key, entry.value) if entry is not None else None
    if world is None or not world.members:
        raise ConfigError(
            f"job {printable(keys.run_id)} is not training", hint="see `elastic status`"
        )
    return world


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic profile``."""
    own = CommandParser(
        prog="elastic profile",
        description="Record torch.profiler traces of a running job's next steps, one file per "
        "rank. Needs scripts that call elastic.join().",
        epilog="exit codes: 0 requested; 1 the job has ended; 2 usage, or the job is not training; "
        "69 etcd unreachable, or access denied",
    )
    add_job_arguments(own, environ)
    own.add_argument(
        "--steps", type=int, default=10, help="number of steps to trace (default: %(default)s)"
    )
    own.add_argument("--ranks", default="", metavar="0,4-7", help="ranks to trace (default: all)")
    return own
