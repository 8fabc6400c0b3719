"""How long to wait after failures of etcd: twice as long after each, with jitter."""

from __future__ import annotations

import random

from elastic.tuning.agent_intervals import STORE_BACKOFF_CAP_S, STORE_RETRY_S

_MAX_DOUBLINGS = 10  # far beyond the cap, and no large number


def pause_s(failures: int) -> float:
    """The pause after ``failures`` others in a row: half of it is random, so that the clients of a
    restarted etcd do not all reconnect at once."""
    longest_s = min(STORE_BACKOFF_CAP_S, STORE_RETRY_S * 2 ** min(failures, _MAX_DOUBLINGS))
    return random.uniform(longest_s / 2, longest_s)
