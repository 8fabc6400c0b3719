"""Which ranks are slower than the others, and why: pure functions over their step times.

All ranks of a data-parallel job begin and end a step together, regardless of their own work in it.
So the relevant time is the one that a rank spends on its own work, waiting for a batch and
computing: per sample, since shares differ, and per step as well, since a rank with a small share
pays the fixed costs of a step for fewer samples, but delays no other.

A rank is slow in a window if its own time is an outlier by the modified z-score (median and median
absolute deviation: Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993), a factor above
the median, and costs a significant part of a step. After several such windows in a row it is a
straggler. Ranks that are all slow have a slow median, and half of them fast and half slow a large
deviation: in neither case are there stragglers.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic.hangs.page import StepDurations, StepPart

# In seconds: below the resolution of a clock.
_NOTHING = 1e-9

RankKey = tuple[str, int]
"""Node id and local rank: they do not change when ranks are renumbered."""

# Of the median absolute deviation, the standard deviation of a normal distribution.
_DEVIATIONS = 1.4826
# Of the median: a smaller spread is taken for this one. Among three ranks, two of which happen to
# be equal, any difference would be an outlier.
_MIN_SPREAD = 0.05


@dataclass(frozen=True, kw_only=True)
class StragglerPolicy:
    """When a rank is a straggler."""

    factor: float = 1.3  # its own time, as a multiple of the median
    z_score: float = 3.0
    windows: int = 3  # in a row, to be found and to have recovered
    least_share: float = 0.05  # of a step, that the others wait for it


@dataclass(frozen=True, kw_only=True)
class RankWindow:
    """The last window of one rank."""

    rank: int
    node_id: str
    node: str  # its name
    local_rank: int
    times: StepDurations

    @property
    def key(self) -> RankKey:
        return self.node_id, self.local_rank

    @property
    def _samples(self) -> float:
        """Samples per step. If they are not counted, every rank has the same number."""
        return self.times.samples / self.times.steps if self.times.samples else 1.0

    @property
    def data_per_sample_s(self) -> float:
        return self.times.data_s / self._samples

    @property
    def compute_per_sample_s(self) -> float:
        return self.times.compute_s / self._samples

    @property
    def own_per_sample_s(self) -> float:
        return self.times.own_s / self._samples

    def of_step_s(self, per_sample_s: float) -> float:
        """The time of a step with this rank's share at that rate."""
        return per_sample_s * self._samples


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One rank compared with the others, in one window."""

    window: RankWindow
    is_slow: bool
    factor: float  # its own time per sample, as a multiple of the typical one
    z_score: float
    cause: StepPart  # DATA or COMPUTE: in which of them it differs most
    typical_data_s: float  # of a step with this rank's share, at the median rate
    typical_compute_s: float
    lag_s: float  # the time per step for which the others wait
    has_majority: bool  # False: with two ranks, it is not known which one is abnormal

    def sentence(self, windows: int) -> str:
        """For users."""
        of, times = self.window, self.window.times
        own_s, typical_s = {
            StepPart.DATA: (times.data_s, self.typical_data_s),
            StepPart.COMPUTE: (times.compute_s, self.typical_compute_s),
        }[self.cause]
        who = "the other rank" if not self.has_majority else "the median of all ranks"
        doubt = "" if self.has_majority else "; with two ranks, either may be the abnormal one"
        return (
            f"rank {of.rank} on {of.node} took {self.factor:.2g} times as long per sample as {who} "
            f"in {windows} windows in a row (robust z-score {self.z_score:.1f}): "
            f"{_ms(own_s)} of {self.cause.label} in a step, where {_ms(typical_s)} are typical; "
            f"the others wait {_ms(self.lag_s)} in each step of {_ms(times.step_s)}{doubt}"
        )


@dataclass(frozen=True, kw_only=True)
class Streak:
    """The consecutive slow or normal windows of a rank."""

    slow: int = 0  # windows in a row
    normal: int = 0
    is_straggler: bool = False


@dataclass(frozen=True, kw_only=True)
class StragglerVerdict:
    """The changes caused by the last window."""

    streaks: Mapping[RankKey, Streak]  # the input of the next evaluation
    found: tuple[Comparison, ...] = ()
    recovered: tuple[Comparison, ...] = ()


def compare(ranks: Sequence[RankWindow], policy: StragglerPolicy) -> tuple[Comparison, ...]:
    """Compare each rank with the others. Empty if there is none to compare with.

    A rank without samples, while others had some, is omitted: it had no work.
    """
    counted = [r for r in ranks if r.times.samples] or list(ranks)
    if len(counted) < 2:
        return ()
    typical_s = _typical([r.own_per_sample_s for r in counted])
    if typical_s < _NOTHING:
        return ()
    deviations = [abs(r.own_per_sample_s - typical_s) for r in counted]
    spread_s = max(_DEVIATIONS * _typical(deviations), _MIN_SPREAD * typical_s)
    step_s = _typical([r.times.own_s for r in counted])
    data_s = _typical([r.data_per_sample_s for r in counted])
    compute_s = _typical([r.compute_per_sample_s for r in counted])

    def compared(rank: RankWindow) -> Comparison:
        own_s = rank.own_per_sample_s
        factor, z_score = own_s / typical_s, (own_s - typical_s) / spread_s
        lag_s = max(0.0, rank.of_step_s(own_s - typical_s))
        waits_for_data = rank.data_per_sample_s - data_s > rank.compute_per_sample_s - compute_s
        is_slow = (
            factor >= policy.factor
            and rank.times.own_s >= policy.factor * step_s
            and z_score >= policy.z_score
            and lag_s >= policy.least_share * rank.times.step_s
        )
        return Comparison(
            window=rank,
            is_slow=is_slow,
            factor=factor,
            z_score=z_score,
            cause=StepPart.DATA if waits_for_data else StepPart.COMPUTE,
            typical_data_s=rank.of_step_s(data_s),
            typical_compute_s=rank.of_step_s(compute_s),
            lag_s=lag_s,
            has_majority=len(counted) > 2,
        )

    return tuple(compared(rank) for rank in counted)


def advance(
    streaks: Mapping[RankKey, Streak], ranks: Sequence[RankWindow], policy: StragglerPolicy
) -> StragglerVerdict:
    """Evaluate one more window of all ranks: new stragglers, and recovered ones.

    Records of other ranks are kept: they may belong to a node that was excluded.
    """
    after = dict(streaks)
    found, recovered = [], []
    for comparison in compare(ranks, policy):
        key = comparison.window.key
        before = after.get(key, Streak())
        if comparison.is_slow:
            streak = replace(before, slow=before.slow + 1, normal=0)
        else:
            streak = replace(before, slow=0, normal=before.normal + 1)
        if streak.slow >= policy.windows and not streak.is_straggler:
            streak = replace(streak, is_straggler=True)
            found.append(comparison)
        elif streak.normal >= policy.windows and streak.is_straggler:
            streak = replace(streak, is_straggler=False)
            recovered.append(comparison)
        after[key] = streak
    return StragglerVerdict(streaks=after, found=tuple(found), recovered=tuple(recovered))


def _typical(values: Sequence[float]) -> float:
    """The median; of two values the smaller one, so that the slower rank is compared with the
    faster."""
    return min(values) if len(values) == 2 else statistics.median(values)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
