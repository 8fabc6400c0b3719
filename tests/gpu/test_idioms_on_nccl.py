"""Scripts as users write them, on real NCCL: one of three ranks dies at a random line.

The ranks share the first GPU (:mod:`kit.shared_gpu`). As in
tests/idioms/test_on_streams.py, each script must end with the result of a run with one worker.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
from catalogue import Idiom, idioms
from idiom_runs import SIZE, IdiomRuns, assert_same

from elastic.testing.small_world.world import SmallWorld

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(540)]

NOT_ON_NCCL = {"dlrm", "sparse_embedding"}  # sparse gradients need a special build of NCCL
# Tensors are on the GPU by torch.set_default_device("cuda"), with which torch itself fails there.
NOT_ON_A_GPU = {
    **dict.fromkeys(
        (
            "begin_and_commit",
            "cross_validation",
            "gradient_noise",
            "grpo",
            "reinforce",
            "subset",
            "subset_sampler",
        ),
        "draws from a generator on the CPU",
    ),
    "ctc": "packs sequences, whose lengths torch takes on the CPU only",
    **dict.fromkeys(("data_workers", "loader_options"), "forks workers that read a tensor"),
    "nanogpt_train": "reads batches from a file",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IdiomRuns]:
    with SmallWorld(prepare="kit.shared_gpu:train_there") as world:
        yield IdiomRuns(world, tmp_path_factory.mktemp("idioms"))


@pytest.mark.parametrize("idiom", idioms(), ids=lambda idiom: idiom.name)
def test_a_death_does_not_change_the_result(runs: IdiomRuns, idiom: Idiom) -> None:
    if idiom.name in NOT_ON_NCCL:
        pytest.skip("NCCL has no sparse collectives")
    if why := NOT_ON_A_GPU.get(idiom.name):
        pytest.skip(why)
    seed = zlib.crc32(idiom.name.encode())
    alone = runs.alone(idiom)
    outcome = runs.with_random_death(idiom, seed, alone, is_replaced=seed % 2 == 1)
    outcome.assert_success(workers=SIZE if seed % 2 else SIZE - 1)
    assert outcome.died_at, "nobody has died"
    assert_same(idiom, outcome, alone)
