"""Hugging Face Trainer with ``elastic.integrations.transformers``: all that plain Trainer trains,
logs and saves on three undisturbed ranks, with ranks that die and join."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic.errors import ConfigError
from elastic.testing.small_world.world import CALLS, STOP, Death, RunOutcome, SmallWorld

# Not imported: each process of pytest collects this file.
pytestmark = pytest.mark.skipif(
    None in map(importlib.util.find_spec, ("transformers", "accelerate")),
    reason="needs torch-elastic-harness[transformers]",
)

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = SCRIPTS / "hf_trainer.py"
SIZE = 3
DEVICE = "kit.shared_gpu:share_if_told"
WARM = [
    "accelerate",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.optimization",
    "transformers.trainer",
]
# Trainer sums the logged loss in float32.
LOGGED = 1e-6


@dataclass
class Ran:
    """A run of the script, and what each of its workers has left."""

    outcome: RunOutcome
    facts: list[dict[str, Any]]  # of the workers that have ended well

    @property
    def updates(self) -> dict[int, list[int]]:
        """The samples of all ranks in each update."""
        samples: dict[int, list[int]] = {}
        for facts in self.facts:
            for update, indices in facts["updates"].items():
                samples[int(update)] = sorted(samples.get(int(update), []) + indices)
        return samples


@dataclass
class Runs:
    """Runs of the script, and the references among them: plain Trainer on three ranks."""

    world: SmallWorld
    folder: Path
    _number: itertools.count[int] = field(default_factory=itertools.count)
    _plain: dict[str, Ran] = field(default_factory=dict)

    def plain(self, options: Mapping[str, Any], script: Path = SCRIPT) -> Ran:
        key = f"{script} {json.dumps(options)}"
        if key not in self._plain:
            self._plain[key] = self.run("plain", options, script=script)
            self._plain[key].outcome.assert_success(workers=SIZE)
        return self._plain[key]

    def run(
        self,
        whose: str,
        options: Mapping[str, Any],
        *,
        out: Path | None = None,
        size: int = SIZE,
        script: Path = SCRIPT,
        **others: Any,
    ) -> Ran:
        folder = self.folder / str(next(self._number))
        out = folder / "out" if out is None else out
        variables = {"OUT": str(out), "ELASTIC_MAX_NODES": str(SIZE), "MASTER_ADDR": "127.0.0.1"}
        outcome = self.world.run(
            script,
            folder,
            size=size,
            arguments=[whose, json.dumps(options)],
            environment=variables,
            is_counted=False,
            **others,
        )
        left = {int(path.suffixes[-2][1:]): path for path in out.parent.glob(f"{out.name}.*.json")}
        return Ran(outcome, [json.loads(left[w.pid].read_text()) for w in outcome.survivors])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with SmallWorld(prepare=DEVICE, imports=WARM) as world:
        yield Runs(world, tmp_path_factory.mktemp("hf"))


def at(place: str, *, rank: int, event: int, script: Path = SCRIPT) -> Death:
    """A death before a line of the script with this comment."""
    lines = script.read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if text.endswith(f"# {place}"))
    return Death(rank=rank, event=event, line=line)


def assert_same(ran: Ran, plain: Ran, *, workers: int, weights: float = 1e-12) -> None:
    """All ranks have trained, logged and saved what plain Trainer has."""
    ran.outcome.assert_success(workers=workers)
    expected = plain.facts[0]
    for facts in ran.facts:
        for name in ("state", "checkpoints"):
            assert facts[name] == expected[name], name
        assert facts["rates"] == pytest.approx(expected["rates"], rel=1e-12)
        # Its last entry and its result have a remainder of the loss, in plain Trainer that of a
        # rank, here that of all.
        losses = [each["result"][1] for each in plain.facts]
        assert facts["result"][0] == expected["result"][0]
        assert facts["result"][1] == pytest.approx(sum(losses) / len(losses), abs=LOGGED)
        assert len(facts["log"]) == len(expected["log"])
        for entry, other in zip(facts["log"], expected["log"], strict=True):
            assert entry.keys() == other.keys()
            for name in entry.keys() - {"train_loss", "total_flos"}:
                assert entry[name] == pytest.approx(other[name], abs=LOGGED), (name, other["step"])
    assert_weights(ran, plain, weights)


def assert_weights(ran: Ran, plain: Ran, tolerance: float) -> None:
    reference = plain.outcome.survivors[0].result
    for worker in ran.outcome.survivors:
        for name, value in reference.items():
            torch.testing.assert_close(worker.result[name], value, rtol=0, atol=tolerance, msg=name)


MEANS: dict[str, Any] = {}
TOKENS = {
    "model": "gpt2",
    "args": {
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
    },
}
EVERYTHING = {
    "metrics": True,
    "patience": 3,
    "args": {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
        "save_total_limit": 2,
        "num_train_epochs": 4,
        "learning_rate": 0.05,
    },
}
EPOCHS = {
    "metrics": True,
    "patience": 1,
    "args": {
        "eval_strategy": "epoch",
        "save_strategy": "best",
        "logging_strategy": "epoch",
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
        "num_train_epochs": 5,
        "learning_rate": 0.05,
        "gradient_accumulation_steps": 2,
    },
}
# bfloat16 rounds each batch.
WEIGHTS = {"bf16": 0.05}
MATRIX: dict[str, dict[str, Any]] = {
    "means": MEANS,
    "tokens": TOKENS,
    "everything": EVERYTHING,
    "epochs": EPOCHS,
    "accumulation": {"args": {"gradient_accumulation_steps": 3}},
    "data workers": {
        "args": {
            "dataloader_num_workers": 2,
            "gradient_accumulation_steps": 2,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
        }
    },
    "lengths": TOKENS | {"args": {"train_sampling_strategy": "group_by_length"}},
    "max_steps": {"args": {"max_steps": 7}},
    "drop_last": {
        "args": {"dataloader_drop_last": True, "gradient_accumulation_steps": 3},
    },
    "evaluations": {"evaluates": True, "args": {"eval_on_start": True}},
    "trained twice": EPOCHS | {"trainings": 2},
    "bf16": {"model": "gpt2", "double": False, "args": {"bf16": True}},
    "two backward passes": {
        "adversarial": True,
        "args": {"gradient_accumulation_steps": 2, "logging_steps": 1},
    },
    "own loader": {
        "loader": True,
        "args": {
            "dataloader_num_workers": 1,
            "dataloader_persistent_workers": True,
            "eval_strategy": "epoch",
        },
    },
    "a seed before training": {"seed": 13},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MATRIX)
def test_undisturbed_training_is_that_of_plain_trainer(runs: Runs, kind: str) -> None:
    plain, ran = runs.plain(MATRIX[kind]), runs.run("elastic", MATRIX[kind])
    assert_same(ran, plain, workers=SIZE, weights=1e-7 if kind in WEIGHTS else 1e-12)
    assert ran.updates == plain.updates
    for facts in ran.facts:
        assert facts["events"] == plain.facts[0]["events"]
        assert facts["flos"] == plain.facts[0]["flos"]


# Samples to evaluate: the last batch lacks some, or the last ranks of the largest world have none.
HELD_OUT = [17, 19, 20]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{}, *({"held_out": n, "model": "gpt2"} for n in HELD_OUT)])
def test_an_evaluation_before_training_is_that_at_its_start(
    runs: Runs, kind: dict[str, Any]
) -> None:
    ran = runs.run("elastic", MATRIX["evaluations"] | kind)
    for facts in ran.facts:
        assert facts["before"] == pytest.approx(facts["log"][0]["eval_loss"], abs=LOGGED)


@pytest.mark.slow
@pytest.mark.parametrize("held_out", HELD_OUT)
def test_a_loss_by_token_is_that_of_the_largest_world(runs: Runs, held_out: int) -> None:
    options = TOKENS | {"held_out": held_out}
    ran = runs.run("elastic", options, death=at("A BATCH", rank=1, event=4))
    assert_same(ran, runs.plain(options), workers=SIZE - 1)


# Of the data sets' sizes, one leaves the ranks uneven shares.
PREDICTIONS: dict[str, Any] = {"predicts": [17, 18], "args": {"num_train_epochs": 1}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "rank", "is_replaced"),
    [
        (2, 0, False),
        (2, 1, True),
        (4, 0, True),  # in the second call: the first is complete when a node joins
    ],
)
def test_every_rank_gets_all_predictions(
    runs: Runs, event: int, rank: int, is_replaced: bool
) -> None:
    death = at("AN EVALUATED BATCH", rank=rank, event=event)
    ran = runs.run("elastic", PREDICTIONS, death=death, is_replaced=is_replaced)
    assert ran.outcome.died_at, ran.outcome.describe()
    ran.outcome.assert_success(workers=SIZE if is_replaced else SIZE - 1)
    expected = runs.plain(PREDICTIONS).facts[0]["predictions"]
    assert [len(rows) for rows, *_ in expected] == PREDICTIONS["predicts"]
    for facts in ran.facts:
        for own, plain in zip(facts["predictions"], expected, strict=True):
            assert [len(own[0]), own[1]] == [len(plain[0]), plain[1]]
            numbers, others = torch.tensor(own[0]), torch.tensor(plain[0])
            torch.testing.assert_close(numbers, others, atol=1e-12, rtol=0)


def check_death(runs: Runs, kind: str, death: Death, *, is_replaced: bool = False) -> None:
    plain = runs.plain(MATRIX[kind])
    ran = runs.run("elastic", MATRIX[kind], death=death, is_replaced=is_replaced)
    assert ran.outcome.died_at, ran.outcome.describe()
    if kind == "bf16":
        ran.outcome.assert_success(workers=SIZE - 1)
        assert_weights(ran, plain, WEIGHTS[kind])
        return
    workers = SIZE if is_replaced else SIZE - 1
    assert_same(ran, plain, workers=workers, weights=WEIGHTS.get(kind, 1e-12))
    for facts in ran.facts[: SIZE - 1]:  # survivors: nothing has happened twice
        assert facts["events"] == plain.facts[0]["events"]


PLACES = [
    at("A BATCH", rank=1, event=5),
    at("A BATCH", rank=0, event=8),
    at("AN EVALUATED BATCH", rank=0, event=4),
    at("A WRITTEN MODEL", rank=0, event=1),
    at("STEP ENDS", rank=1, event=3),
    at("EVALUATED", rank=2, event=2),
    at("SAVED", rank=0, event=2),
    at("EPOCH ENDS", rank=0, event=1),
]
NAMES = [
    "in a step",
    "of rank 0 in a step",
    "in an evaluation",
    "in a save",
    "in on_step_end",
    "in on_evaluate",
    "in on_save",
    "in on_epoch_end",
]
QUICK_PLACES = ("of rank 0 in a step", "in a save")


@pytest.mark.parametrize(
    "name", [n if n in QUICK_PLACES else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_a_death_changes_nothing(runs: Runs, name: str) -> None:
    check_death(runs, "everything", PLACES[NAMES.index(name)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [name for name in MATRIX if name != "everything"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_death_changes_nothing_with(runs: Runs, kind: str, rank: int) -> None:
    check_death(runs, kind, at("A BATCH", rank=rank, event=4))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["accumulation", "data workers", "epochs"])
def test_a_death_at_the_end_of_an_epoch_changes_nothing(runs: Runs, kind: str) -> None:
    """After its last update, which has fewer batches than others."""
    check_death(runs, kind, at("EPOCH ENDS", rank=1, event=1))


def test_a_node_joins(runs: Runs) -> None:
    check_death(runs, "everything", at("A BATCH", rank=0, event=5), is_replaced=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAMES[2], NAMES[3], NAMES[7]])
def test_a_node_joins_after_a_death(runs: Runs, name: str) -> None:
    check_death(runs, "everything", PLACES[NAMES.index(name)], is_replaced=True)


ATTRIBUTES = SCRIPTS / "hf_attributes.py"


@pytest.mark.slow
@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_a_script_counts_in_its_own_attributes_is_the_jobs(
    runs: Runs, is_replaced: bool
) -> None:
    """Also where a rank computes several batches in the place of one."""
    plain = runs.plain({}, script=ATTRIBUTES)
    death = at("A BATCH", rank=0, event=6, script=ATTRIBUTES)
    ran = runs.run("elastic", {}, script=ATTRIBUTES, death=death, is_replaced=is_replaced)
    ran.outcome.assert_success(workers=SIZE if is_replaced else SIZE - 1)
    assert_weights(ran, plain, 1e-12)


TWICE = at("A BATCH", rank=0, event=19)  # in the second epoch of the second call


@pytest.mark.slow
def test_a_death_in_a_second_call_of_train_changes_nothing(runs: Runs) -> None:
    check_death(runs, "trained twice", TWICE)


@pytest.mark.slow
def test_a_node_joins_in_a_second_call_of_train(runs: Runs) -> None:
    for event in (16, 22):
        death = at("A BATCH", rank=1, event=event)
        check_death(runs, "trained twice", death, is_replaced=True)


@pytest.mark.slow
@pytest.mark.parametrize("event", [19, 24], ids=["at its beginning", "later"])
def test_a_job_continues_in_a_second_call_of_train(runs: Runs, event: int) -> None:
    options = MATRIX["trained twice"] | {"join": {"when": 1}}
    ran = runs.run("elastic", options, out=killed(runs, options, event))
    assert_same(ran, runs.plain(MATRIX["trained twice"]), workers=SIZE)


@pytest.mark.slow
def test_a_second_call_of_train_with_other_data_is_refused(runs: Runs) -> None:
    ran = runs.run("elastic", MATRIX["trained twice"] | {"other_data": True})
    errors = [worker.error for worker in ran.outcome.workers if worker.error]
    assert errors and all("train() was called again with another data set" in e for e in errors)


def killed(runs: Runs, options: Mapping[str, Any], event: int) -> Path:
    """Kill all nodes of a job in this batch of a rank."""
    out = runs.folder / f"killed-{next(runs._number)}" / "out"
    ran = runs.run(
        "elastic", options, out=out, death=at("A BATCH", rank=1, event=event), on_death=STOP
    )
    assert not ran.facts
    return out


@pytest.mark.parametrize("size", [2, pytest.param(SIZE, marks=pytest.mark.slow)])
def test_a_job_whose_nodes_have_all_died_continues_from_its_checkpoint(
    runs: Runs, size: int
) -> None:
    options = EVERYTHING | {"join": {"when": 2}}
    out = killed(runs, options, 8)
    ran = runs.run("elastic", options, out=out, size=size)
    assert_same(ran, runs.plain(EVERYTHING), workers=size)
    assert "state-restored source='step-" in ran.outcome.workers[0].log


@pytest.mark.slow
def test_the_jobs_newer_checkpoint_wins_over_the_scripts(runs: Runs) -> None:
    options = EVERYTHING | {"join": {"when": 1}, "resumes": True}
    out = killed(runs, options, 8)
    for folder in out.glob("checkpoint-6"):
        folder.rename(folder.with_name("lost"))
    ran = runs.run("elastic", options, out=out)
    assert "the job continues from its own newer checkpoint" in ran.outcome.workers[0].log
    ran.outcome.assert_success(workers=SIZE)
    assert_weights(ran, runs.plain(EVERYTHING), 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("every", [50, 5], ids=["alone", "beside an older one"])
def test_a_script_resumes_from_its_own_newer_checkpoint(runs: Runs, every: int) -> None:
    without = EVERYTHING | {"patience": 100}  # plain Trainer restarts the count of the callback
    options = without | {"join": {"when": every}, "resumes": True}
    ran = runs.run("elastic", options, out=killed(runs, options, 10))
    has_older = "the newer resume_from_checkpoint" in ran.outcome.workers[0].log
    assert has_older == (every == 5), ran.outcome.describe()
    ran.outcome.assert_success(workers=SIZE)
    assert_weights(ran, runs.plain(without), 1e-12)
    assert ran.facts[0]["state"] == runs.plain(without).facts[0]["state"]
    assert ran.facts[0]["events"][1:3] == ["epoch begins 8", "step 9 1.800000"]


REFUSED = {
    "auto_find_batch_size=True changes": {"auto_find_batch_size": True},
    "batch_rebalance": {"train_sampling_strategy": "batch_rebalance"},
    "average_tokens_across_devices=False": {"average_tokens_across_devices": False},
}


@pytest.mark.parametrize(
    "message", [*REFUSED][:1] + [pytest.param(m, marks=pytest.mark.slow) for m in [*REFUSED][1:]]
)
def test_what_cannot_recover_is_refused(runs: Runs, message: str) -> None:
    ran = runs.run("elastic", {"args": REFUSED[message]})
    errors = [worker.error for worker in ran.outcome.workers if worker.error]
    assert errors
    assert all(e.startswith("ConfigError: ElasticTrainer: ") and message in e for e in errors)


@pytest.mark.slow
def test_the_order_of_samples_is_that_of_accelerates_loaders(runs: Runs, tmp_path: Path) -> None:
    outcome = runs.world.run(SCRIPTS / "hf_orders.py", tmp_path, size=1, is_counted=False)
    outcome.assert_success(workers=1)
    assert int(outcome.workers[0].result["compared"]) > 100


OTHER_VERSION = """
from transformers import Trainer
Trainer._evaluate = lambda self, trial: None
from elastic.integrations.transformers import IS_SUPPORTED, ElasticTrainer
import torch
from torch.utils.data import TensorDataset
from transformers import TrainingArguments
args = TrainingArguments(output_dir="{folder}", report_to=[], use_cpu=True)
trainer = ElasticTrainer(model=torch.nn.Linear(1, 1), args=args)
result = {{"is_supported": IS_SUPPORTED, "joined": hasattr(trainer, "elastic_run")}}
"""


def test_another_version_of_transformers_recovers_by_restarts(runs: Runs, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OTHER_VERSION.format(folder=tmp_path))
    outcome = runs.world.run(script, tmp_path, size=1, is_counted=False)
    outcome.assert_success(workers=1)
    (worker,) = outcome.workers
    assert not worker.result["is_supported"] and not worker.result["joined"]
    assert "has no Trainer._evaluate(trial, ignore_keys_for_eval, skip_scheduler)" in worker.log
    assert "the job recovers by restarts" in worker.log


def test_without_transformers_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "elastic.integrations.transformers", raising=False)
    with pytest.raises(ConfigError, match=r"needs transformers.*\n.*torch-elastic-harness\[transf"):
        importlib.import_module("elastic.integrations.transformers")


# ----------------------------------------------------------------------------
# Subclasses of TRL, with the mixin before them.

TRL: dict[str, dict[str, Any]] = {
    "sft": {"trainer": "sft"},
    "sft of adapters": {"trainer": "sft", "lora": True, "accumulation": 2},
    "sft, packed": {"trainer": "sft", "packing": True},
    "dpo": {"trainer": "dpo"},
    "reward": {"trainer": "reward"},
    "dpo of adapters": {"trainer": "dpo", "lora": True, "accumulation": 2},
}


@pytest.fixture(scope="module")
def trl_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    for package in ("trl", "peft", "datasets"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    trainers = [f"trl.trainer.{name}_trainer" for name in ("dpo", "grpo", "reward", "sft")]
    imports = ["datasets", "peft", *trainers]
    with SmallWorld(imports=[*WARM, "transformers.models.llama.modeling_llama", *imports]) as world:
        yield Runs(world, tmp_path_factory.mktemp("trl"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRL)
def test_trainers_of_trl_are_those_without_a_death(trl_runs: Runs, kind: str) -> None:
    script, options = SCRIPTS / "trl_trainers.py", TRL[kind]
    plain = trl_runs.run("plain", options, script=script)
    plain.outcome.assert_success(workers=SIZE)
    for rank in (None, 0, 1):
        death = None if rank is None else Death(rank=rank, event=40_000, counted=CALLS)
        ran = trl_runs.run("elastic", options, script=script, death=death)
        ran.outcome.assert_success(workers=SIZE if death is None else SIZE - 1)
        # Norms of Llama and TRL's losses are float32.
        assert_weights(ran, plain, 1e-7 if death is None else 1e-5)
        for facts in ran.facts:
            assert facts["state"] == plain.facts[0]["state"]
            assert facts["checkpoints"] == plain.facts[0]["checkpoints"]
            for entry, other in zip(facts["log"], plain.facts[0]["log"], strict=True):
                assert entry == pytest.approx(other, abs=LOGGED, rel=LOGGED)


@pytest.mark.slow
def test_a_trainer_that_generates_what_it_trains_on_is_refused(trl_runs: Runs) -> None:
    ran = trl_runs.run("elastic", {"trainer": "grpo"}, script=SCRIPTS / "trl_trainers.py")
    errors = [worker.error for worker in ran.outcome.workers if worker.error]
    assert errors and all("keeps the completions that a rank has generated" in e for e in errors)


# ----------------------------------------------------------------------------
# Models whose loss is a mean over a batch, although Trainer counts the items of an update.


@pytest.fixture(scope="module")
def mean_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    models = ["transformers.models.t5.modeling_t5", "transformers.models.bert.modeling_bert"]
    with SmallWorld(imports=[*WARM, *models, "transformers.trainer_seq2seq"]) as world:
        yield Runs(world, tmp_path_factory.mktemp("means"))


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 2])
def test_seq2seq_trainer_generates_what_it_does_without_a_death(
    mean_runs: Runs, accumulation: int
) -> None:
    script, options = SCRIPTS / "seq2seq.py", {"accumulation": accumulation}
    plain = mean_runs.run("plain", options, script=script)
    plain.outcome.assert_success(workers=SIZE)
    expected = plain.facts[0]
    for event, rank in ((20_000, 1), (45_000, 0), (95_000, 2)):
        death = Death(rank=rank, event=event, counted=CALLS)
        ran = mean_runs.run("elastic", options, script=script, death=death)
        ran.outcome.assert_success(workers=SIZE - 1)
        assert_weights(ran, plain, 1e-6)
        for facts in ran.facts:
            for name in ("state", "checkpoints", "predicted", "test"):
                assert facts[name] == expected[name], (name, ran.outcome.died_at)
            for entry, other in zip(facts["log"], expected["log"], strict=True):
                assert entry == pytest.approx(other, abs=LOGGED, rel=LOGGED)


@pytest.mark.parametrize(
    "labels", ["own", *(pytest.param(n, marks=pytest.mark.slow) for n in ("classes", "tokens"))]
)
def test_a_mean_over_a_batch_is_that_of_the_largest_world(mean_runs: Runs, labels: str) -> None:
    script, options = SCRIPTS / "bert.py", {"labels": labels}
    plain = mean_runs.run("plain", options, script=script)
    plain.outcome.assert_success(workers=SIZE)
    ran = mean_runs.run(
        "elastic", options, script=script, death=at("STEP", rank=1, event=2, script=script)
    )
    ran.outcome.assert_success(workers=SIZE - 1)
    assert ran.outcome.died_at
    assert_weights(ran, plain, 1e-12)
    expected = plain.facts[0]
    for facts in ran.facts:
        assert facts["seen"] == expected["seen"]
        losses, others = ([e["loss"] for e in f["log"] if "loss" in e] for f in (facts, expected))
        assert losses == pytest.approx(others, abs=LOGGED, rel=LOGGED)
