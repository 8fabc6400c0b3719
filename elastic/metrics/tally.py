"""Counts by metric and labels. Written by any thread, read without a lock.

A scrape must be answered while another thread hangs (elastic/health/endpoints.py), so readers take
copies, which the interpreter makes atomically; only writers take the lock. Label values can
come from users or another version: each is sanitized and shortened, and a metric has at
most :data:`MAX_SERIES` sets of labels on one node. Further ones are counted as ``other``.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from elastic.metrics.table import ETCD_BUCKETS, Metric

MAX_SERIES = 64
OTHER = "other"
_LONGEST_VALUE = 100

Labels = tuple[str, ...]  # values, in the order of the metric's label names


@dataclass(frozen=True, slots=True)
class Distribution:
    """Observations: count, sum, and count per bucket, the last one unbounded."""

    count: float = 0.0
    total: float = 0.0
    buckets: tuple[int, ...] = (0,) * (len(ETCD_BUCKETS) + 1)


class Tally:
    """The tally. One per agent."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may count, too, and interrupt its own thread here.
        self._lock = threading.RLock()
        self._counts: dict[tuple[Metric, Labels], float] = {}
        self._distributions: dict[tuple[Metric, Labels], Distribution] = {}
        self._series: Counter[Metric] = Counter()

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter, which never decreases: an amount that is not positive is ignored."""
        if not (math.isfinite(amount) and amount >= 0):
            return
        with self._lock:
            key = self._key(metric, labels, self._counts)
            self._counts[key] = self._counts.get(key, 0.0) + amount

    def observe(self, metric: Metric, value: float, *, times: int = 1, **labels: str) -> None:
        """``value`` is the sum of ``times`` observations (of one, for a histogram)."""
        if not (math.isfinite(value) and value >= 0 and times >= 0):
            return
        with self._lock:
            key = self._key(metric, labels, self._distributions)
            before = self._distributions.get(key, Distribution())
            buckets = list(before.buckets)
            buckets[bisect_left(ETCD_BUCKETS, value)] += times
            # A new object, so that readers see a complete observation or none of it.
            self._distributions[key] = Distribution(
                before.count + times, before.total + value, tuple(buckets)
            )

    def counts(self) -> Mapping[tuple[Metric, Labels], float]:
        """As of now. Takes no lock."""
        return self._counts.copy()

    def distributions(self) -> Mapping[tuple[Metric, Labels], Distribution]:
        """As of now. Takes no lock."""
        return self._distributions.copy()

    def _key(
        self,
        metric: Metric,
        labels: Mapping[str, str],
        known: Mapping[tuple[Metric, Labels], object],
    ) -> tuple[Metric, Labels]:
        key = metric, tuple(label_value(labels[name]) for name in metric.labels)
        if key not in known:
            if self._series[metric] >= MAX_SERIES:
                return metric, (OTHER,) * len(metric.labels)
            self._series[metric] += 1
        return key


def label_value(text: str) -> str:
    """A label value that is printable, valid Unicode and of bounded length.

    >>> label_value("a\\x1b[31m\\ud800b")
    'a?[31m?b'
    """
    cut = text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 1]}…"
    return "".join(c if c.isprintable() else "?" for c in cut)
