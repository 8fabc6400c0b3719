"""Runs generated scripts, and prints a table of what fails.

python tests/generator/run.py --seeds 0:1000
python tests/generator/run.py --seed 17          # one, with its script and its logs' folder
python tests/generator/run.py --seed 17 --shrink # to the fewest parts that fail alike
python tests/generator/run.py --seeds 0:1000 --shrink
python tests/generator/run.py --seed 17 --show   # only print the script
PYTHONPATH=tests python tests/generator/run.py --prepare kit.shared_gpu:train_there   # on NCCL
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from scenarios import Runner, Scenario, Verdict, draw_scenario, from_json, plain
from shrinking import shrunk

from elastic.testing.small_world.world import SmallWorld


def seeds_of(text: str) -> range:
    """``3:10`` or ``7``."""
    first, _, last = text.partition(":")
    return range(int(first), int(last) if last else int(first) + 1)


def verdicts(
    scenarios: Sequence[Scenario],
    folder: Path,
    *,
    processes: int,
    is_shrunk: bool,
    limit_s: float,
    prepare: str,
) -> Iterator[Verdict]:
    """Of each scenario, in their order; each process is a small world."""
    runners: SimpleQueue[Runner] = SimpleQueue()
    worlds = [SmallWorld(prepare=prepare) for _ in range(processes)]
    for world in worlds:
        runners.put(Runner(world, folder, limit_s))

    def one(scenario: Scenario) -> Verdict:
        runner = runners.get()
        try:
            verdict = runner.run(scenario)
            return shrunk(runner, verdict) if is_shrunk and verdict.failed else verdict
        finally:
            runners.put(runner)

    try:
        with ThreadPoolExecutor(processes) as pool:
            yield from pool.map(one, scenarios)
    finally:
        for world in worlds:
            world.close()


def table(judged: Sequence[Verdict], *, is_shrunk: bool) -> str:
    """Failures by combination of parts if they are shrunk, else by single part."""
    failed = [verdict for verdict in judged if verdict.failed]
    kinds = dict(Counter(verdict.kind for verdict in failed))
    rows = [f"{len(judged)} scenarios, {len(failed)} failures: {kinds}"]
    if is_shrunk:
        combinations = Counter((verdict.kind, _combination(verdict)) for verdict in failed)
        rows += [f"{n:5d} {kind:8s} {parts}" for (kind, parts), n in combinations.most_common()]
        return "\n".join(rows)
    drawn = Counter(label for verdict in judged for label in verdict.scenario.script.labels)
    bad = Counter(label for verdict in failed for label in verdict.scenario.script.labels)
    by_share = sorted(bad, key=lambda label: (-bad[label] / drawn[label], label))
    return "\n".join(rows + [f"{bad[label]:5d} of {drawn[label]:4d} {label}" for label in by_share])


def _combination(verdict: Verdict) -> str:
    scenario = verdict.scenario
    way = "nobody dies" if scenario.rank < 0 else scenario.way
    how = f"{scenario.script.sharding} {way}".strip() + (", again" if scenario.later else "")
    return f"{how}: {' + '.join(scenario.script.added) or 'none'}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", "--seed", type=seeds_of, default=range(100))
    parser.add_argument("--again", type=Path, nargs="+", help="kept scenarios, instead of seeds")
    parser.add_argument("--shrink", action="store_true", help="to the fewest parts that fail alike")
    parser.add_argument(
        "--without", nargs="+", default=(), metavar="PART", help="skip scripts with these parts"
    )
    parser.add_argument(
        "--open", action="store_true", help="also parts that are known not to be exact yet"
    )
    parser.add_argument(
        "--with", nargs="+", default=(), metavar="PART", dest="having", help="only scripts with one"
    )
    parser.add_argument("--show", action="store_true", help="only print the script of the first")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=40.0, help="of a run, before it is a hang")
    parser.add_argument(
        "--prepare", default="", metavar="MODULE:FUNCTION", help="each worker calls it first"
    )
    parser.add_argument("--folder", type=Path, help="for scripts and logs; default: temporary")
    given = parser.parse_args(arguments)
    if given.again:
        scenarios = [from_json(json.loads(path.read_text())) for path in given.again]
    else:
        drawn = [draw_scenario(seed, with_open=given.open) for seed in given.seeds]
        scenarios = [s for s in drawn if not set(given.without) & set(s.script.labels)]
        if given.having:
            scenarios = [s for s in scenarios if set(given.having) & set(s.script.labels)]
    if given.show:
        scenario = scenarios[0]
        print(scenario.script.text(plain(scenario).description))
        return 0
    folder = given.folder or Path(tempfile.mkdtemp(prefix="generated-"))
    judged: list[Verdict] = []
    try:
        for verdict in verdicts(
            scenarios,
            folder,
            processes=min(given.processes, len(scenarios)),
            is_shrunk=given.shrink,
            limit_s=given.limit_s,
            prepare=given.prepare,
        ):
            judged.append(verdict)
            if verdict.failed:
                print(verdict.describe(), flush=True)
            elif len(scenarios) == 1:
                died_at = verdict.died_at or "no line"
                print(f"seed {verdict.scenario.seed}: as alone; died at {died_at}")
    except KeyboardInterrupt:
        print(f"interrupted after {len(judged)} of {len(scenarios)}")
    deaths = sum(len(verdict.died_at.split("; ")) for verdict in judged if verdict.died_at)
    print(f"{deaths} deaths")
    print(table(judged, is_shrunk=given.shrink))
    return int(any(verdict.failed for verdict in judged))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
