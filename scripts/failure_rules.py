"""Write docs/reference/failures.md: the rules of failure verdicts, and how well they do.

python scripts/failure_rules.py          # write the page
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from elastic.membership.failures import RULES, Action, FailureFacts, Rule, judge_failure  # noqa: E402  found by the line above  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "failures.md"
CORPUS = ROOT / "tests" / "data" / "failure_corpus.json"

_HEAD = """# Failure verdicts

Written by `scripts/failure_rules.py`; do not edit.

When workers fail and no node was lost, the leader judges one failure by its text and exit code: the
first that is not the consequence of another one. The text is the exception that ended the script;
there is none if the script catches it and calls `sys.exit(1)`, or is killed by a signal.

- **restart**: the next world has the same nodes, within the failure budget; the same error three
  times at one step, or in a row without progress, ends the job with it.
- **exclude-node**: the node is quarantined for `quarantine_s` (60 s), if the others suffice.
- **stop**: every attempt would fail again. With high confidence the job ends at once, with that
  error; with medium confidence it restarts, and ends when the error repeats.

An error of the code (AttributeError, TypeError, ValueError, LookupError, AssertionError and the
like) that no rule knows restarts the job. If every node of the world raises it at the same line, a
lone node twice, and the job has never made a step, the job ends at once (`fails-everywhere`).
OSError, RuntimeError and the exceptions of other libraries are tried again.

A worker that was ended by SIGKILL while the kernel's OOM killer was active in its cgroup is
`host-out-of-memory` with high confidence. *Consequence* marks texts that only state that a peer is
gone: they never count as errors of the script.

*Kernel log* marks rules that are also applied to `/dev/kmsg` since the start of the workers, which
needs `CAP_SYSLOG` or `kernel.dmesg_restrict=0`, and in a container `/dev/kmsg`. A definite fault of
the machine (Xid of hardware, uncorrectable memory errors) explains every failure except an error of
the script; errors of a disk explain an otherwise unexplained failure; an OOM kill, or a fault of
the script's kernels on a GPU, explains that of a process without an error text.

The first matching rule applies. *Local* causes: if workers of the job have trained on other nodes,
only this node is excluded; otherwise the cause is attributed to the job (or, for drivers and
devices, the job restarts). The event `failure-judged` has the verdict, its rule and the line.

"""


def corpus() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(CORPUS.read_text(encoding="utf-8"))
    return found


def judged(example: dict[str, Any]) -> Action:
    """The verdict on one example of the corpus."""
    facts = FailureFacts(
        text=example["text"],
        exit_code=example["exit_code"],
        works_elsewhere=example["works_elsewhere"],
        is_oom_kill=example["is_oom_kill"],
        kernel_log=tuple(example.get("kernel_log", ())),
    )
    return judge_failure(facts).action


def scores(examples: list[dict[str, Any]]) -> dict[Action, tuple[int, float, float]]:
    """Per action: number of examples, precision and recall."""
    pairs = Counter((Action(e["label"]), judged(e)) for e in examples)
    found = {}
    for action in Action:
        right = pairs[action, action]
        labelled = sum(n for (label, _), n in pairs.items() if label is action)
        said = sum(n for (_, verdict), n in pairs.items() if verdict is action)
        found[action] = labelled, right / max(1, said), right / max(1, labelled)
    return found


def _row(rule: Rule) -> str:
    local = "yes" if rule.is_local else ""
    consequence = "yes" if rule.is_consequence else ""
    in_kernel_log = "yes" if rule.reads_kernel_log else ""
    marks = (local, consequence, in_kernel_log)
    cells = (rule.name, rule.action.value, rule.confidence.value, *marks, rule.reason)
    return f"| {' | '.join(cells)} |"


def page() -> str:
    examples = corpus()
    rules = [
        "| rule | verdict | confidence | local | consequence | kernel log | meaning |",
        "|---|---|---|---|---|---|---|",
    ]
    rules += [_row(rule) for rule in RULES]
    table = ["| verdict | examples | precision | recall |", "|---|---|---|---|"]
    table += [
        f"| {action.value} | {count} | {precision:.2f} | {recall:.2f} |"
        for action, (count, precision, recall) in scores(examples).items()
    ]
    about = (
        f"Measured on {len(examples)} labelled texts (`tests/data/failure_corpus.json`, most of "
        "them from public issues). The rules were written with the corpus at hand: expect less on "
        "other texts. A text that no rule matches means restart."
    )
    return _HEAD + "\n".join([*rules, "", "## How well they do", "", about, "", *table]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
