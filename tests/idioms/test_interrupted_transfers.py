"""A partially transferred state is discarded: it is received again, or the job ends.

The joining node receives weights directly into its model, which then holds some of the source's.
"""

from __future__ import annotations

from pathlib import Path

import torch
from idiom_runs import IdiomRuns
from test_worst_places import BY_ITSELF, HEAD, STEP, TAIL, TRAINED

INTERRUPTED = """
from elastic.train import transfer
from elastic.train.transfer import Reconfiguration
transfer.SHORTEST_CHUNK_BYTES = transfer.LONGEST_CHUNK_BYTES = 4096
whole_transfer, finish_chunk = Reconfiguration._transfer, transfer.ChunkedTransfer.finish_chunk
chunks, seen = [], {}
result = {}

def weights():
    return torch.cat([p.detach().flatten() for p in network.parameters()])

def interrupted(self, sent):
    finish_chunk(self, sent)
    chunks.append(sent)
    if self._is_source and len(chunks) == 20:
        raise dist.DistNetworkError("interrupted")

def transferred(self, world, agreement):
    before = weights().clone()
    try:
        whole_transfer(self, world, agreement)
    except BaseException:
        if world.rank in agreement.receivers:
            changed = weights() != before
            seen.update(some=changed.any(), all=changed.all())
        elif LOSES:
            self._progress.lose_state(is_saved=True)
        raise

transfer.ChunkedTransfer.finish_chunk = interrupted
Reconfiguration._transfer = transferred

def train():
    for epoch in run.epochs(2):
        for i, (inputs, targets) in enumerate(loader, start=loader.index):
            die(epoch * 8 + i, 5)
            STEP
""".replace("STEP", STEP)


def script(folder: Path, *, loses: bool) -> Path:
    path = folder / "script.py"
    body = INTERRUPTED.replace("LOSES", str(loses))
    path.write_text(HEAD + TRAINED + body + TAIL + "result.update(seen)\n")
    return path


def test_partially_received_weights_are_received_again(runs: IdiomRuns, tmp_path: Path) -> None:
    path = script(tmp_path, loses=False)
    alone = runs.world.run(path, tmp_path / "alone", size=1)
    outcome = runs.world.run(path, tmp_path / "job", size=3, death=BY_ITSELF, is_replaced=True)
    outcome.assert_success(workers=3)
    expected = alone.survivors[0].result
    *others, joining_node = (worker.result for worker in outcome.survivors)
    assert joining_node.pop("some") and not joining_node.pop("all"), outcome.describe()
    for result in (*others, joining_node):
        assert result.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(result[name], weight, rtol=1e-9, atol=1e-9, msg=name)


def test_partially_received_weights_end_the_job_if_no_rank_has_the_state(
    runs: IdiomRuns, tmp_path: Path
) -> None:
    path = script(tmp_path, loses=True)
    outcome = runs.world.run(path, tmp_path / "job", size=3, death=BY_ITSELF, is_replaced=True)
    assert not outcome.survivors, outcome.describe()
    errors = [worker.error for worker in outcome.workers if worker.exit_code is not None]
    message = "CheckpointRequired: a fault interrupted an update or a transfer of the weights"
    assert any(message in error for error in errors), outcome.describe()
