"""``run.build`` in one process: construction, saving and loading, and invalid uses."""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.run_kit import dataset, network, parts_of, process, run_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from elastic import torch_fsdp
from elastic.errors import ConfigError, ElasticError, TrainingError
from elastic.telemetry.journal import Journal
from elastic.testing.forks.server import run_forked
from elastic.testing.waiting import PATIENCE_S
from elastic.train.checkpointing import CheckpointManager
from elastic.train.folder import Checkpoints
from elastic.train.rebuilding import Built, ShareWeight, WeightedReduceScatter
from elastic.train.run import Run


def build(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(run: Run, epochs: int, build: Callable[[DeviceMesh], Any] = build) -> dict[str, Any]:
    """The full weights at the end, as plain tensors."""
    loader = run.loader(DataLoader(dataset(), batch_size=10, shuffle=True), global_batch=10)
    weights = {}

    def loop() -> None:
        model, optimizer, *_ = run.build(build)
        for _ in run.epochs(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        weights.update({k: v.full_tensor() for k, v in model.state_dict().items()})

    run.retry(loop)
    return weights


def refused(kind: type[ElasticError], message: str) -> Any:
    return pytest.raises(kind, match=re.escape(message))


def in_retry(run: Run, act: Callable[[], Any]) -> None:
    run.retry(act)


# Training and resuming ---------------------------------------------------------------------------


def test_a_second_process_continues_with_the_shards_of_the_first(tmp_path: Path) -> None:
    with process(tmp_path / "at-once") as run:
        at_once = train(run, 2)
    with process(tmp_path / "in-two") as run:
        half = train(run, 1)
    with process(tmp_path / "in-two") as run:
        resumed = train(run, 2)
        assert parts_of(run).session.job.progress.step == 2 * 6
    for name, value in at_once.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0)
    assert not torch.equal(half["0.weight"], resumed["0.weight"])


def test_a_checkpoint_of_a_wrapped_model_loads_into_a_built_one_and_back(tmp_path: Path) -> None:
    """The names are the same: model, and the optimizer tracked as such."""

    def wrapped(run: Run, epochs: int) -> torch.Tensor:
        model = run.wrap(network())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.track(optimizer=optimizer)
        loader = run.loader(DataLoader(dataset(), batch_size=10, shuffle=True), global_batch=10)
        for _ in run.epochs(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return model.module.state_dict()["0.weight"].clone()  # type: ignore[no-any-return]

    def seeded(mesh: DeviceMesh) -> Any:
        torch.manual_seed(0)
        return build(mesh)

    with process(tmp_path / "reference") as run:
        reference = wrapped(run, 3)
    with process(tmp_path / "mixed") as run:
        wrapped(run, 1)
    with process(tmp_path / "mixed") as run:
        train(run, 2, seeded)
    with process(tmp_path / "mixed") as run:
        torch.testing.assert_close(wrapped(run, 3), reference, rtol=0, atol=1e-12)


def test_schedulers_and_frozen_parameters_are_restored(tmp_path: Path) -> None:
    def with_scheduler(mesh: DeviceMesh) -> Any:
        model, optimizer = build(mesh)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def loop(run: Run, seen: list[Any]) -> None:
        model, optimizer, scheduler = run.build(with_scheduler)
        for _ in run.epochs(1):
            for x, y in loader:
                F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
            next(iter(model.parameters())).requires_grad_(False)
        seen += [optimizer.param_groups[0]["lr"], next(iter(model.parameters())).requires_grad]

    for _ in range(2):
        seen: list[Any] = []
        with process(tmp_path) as run:
            loader = run.loader(DataLoader(dataset(), batch_size=10), global_batch=10)
            run.retry(loop, run, seen)
        assert seen == [0.005, False]


def test_initial_weights_do_not_depend_on_earlier_random_draws(tmp_path: Path) -> None:
    seen = []
    for number in range(2):
        with process(tmp_path / str(number), seed=5) as run:
            torch.rand(number + 1)

            def unseeded(mesh: DeviceMesh) -> Any:
                model = nn.Linear(4, 1).double()
                fully_shard(model, mesh=mesh)
                return model, torch.optim.SGD(model.parameters(), lr=0.1)

            seen.append(train(run, 0, unseeded)["weight"])
    assert torch.equal(*seen)


def test_a_save_during_gradient_accumulation_loses_no_gradients(tmp_path: Path) -> None:
    """A save between two steps that share gradients would lose those of the first."""
    saved = []
    with process(tmp_path, every_steps=1) as run:
        parts = parts_of(run)
        loader = run.loader(DataLoader(dataset(), batch_size=10), global_batch=10)

        def loop() -> None:
            model, optimizer = run.build(build)
            for _ in run.epochs(1):
                for number, (x, y) in enumerate(loader, start=1):
                    (F.mse_loss(model(x), y) / 2).backward()  # type: ignore[no-untyped-call]
                    if number % 2 == 0:
                        optimizer.step()
                        optimizer.zero_grad()
                    saved.append(parts.session.current.accumulation.since)

        run.retry(loop)
    assert saved == [None, 0, None, 2, None, 4]


# Uneven shares -----------------------------------------------------------------------------------


class Comm:
    """A reduce-scatter whose results are its inputs."""

    def __init__(self) -> None:
        self.given: list[list[float]] = []

    def __call__(self, output_tensor: Any, input_tensor: torch.Tensor, **options: Any) -> None:
        self.given.append(input_tensor.tolist())


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 2.0), (0.5, 1.0), (1 + 1e-15, 2.0)])
def test_gradients_are_weighted_where_they_are_reduced(factor: float, expected: float) -> None:
    comm, weight = Comm(), ShareWeight([])
    weight.begin(factor)
    reduced: Any = WeightedReduceScatter(comm, weight.weigh)
    for _ in range(2):
        reduced(output_tensor=None, input_tensor=torch.full((2,), 2.0), group=None, op=None)
    assert comm.given == [[expected, expected]] * 2


def test_a_rank_without_samples_adds_nothing_to_the_gradients() -> None:
    weight = ShareWeight([])
    weight.begin(0.0)
    gradients = torch.tensor([1.0, float("nan")])
    weight.weigh(gradients)
    assert gradients.tolist() == [0.0, 0.0]


def test_a_reduce_scatter_of_the_script_is_kept(tmp_path: Path) -> None:
    comm = Comm()

    def build_with_comm(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
        model: Any = network()
        fully_shard(model, mesh=mesh)
        model.set_custom_reduce_scatter(comm)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    with process(tmp_path) as run:

        def act() -> None:
            model: Any = run.build(build_with_comm)[0]
            (found,) = reduce_scatters(model)
            found(output_tensor=None, input_tensor=torch.ones(1), group=None, op=None)
            assert comm.given == [[1.0]]
            with refused(ConfigError, "model.set_custom_reduce_scatter() is not possible"):
                model.set_custom_reduce_scatter(Comm())

        in_retry(run, act)


def reduce_scatters(part: Any) -> list[Any]:
    found: list[Any] = []

    def note(comm: Any) -> Any:
        found.append(comm)
        return comm

    torch_fsdp.fsdp_wrap_reduce_scatters(part, note)
    return found


def test_gradients_of_earlier_steps_need_samples_in_the_step_that_reduces_them(
    tmp_path: Path,
) -> None:
    with process(tmp_path) as run:

        def act() -> None:
            model: Any = run.build(build)[0]
            built = parts_of(run).session.job.built
            assert built is not None
            built.begin_step(0.5, 1)
            model.set_requires_gradient_sync(False)
            model(torch.ones(2, 4).double()).sum().backward()
            with refused(TrainingError, "this rank has no samples in this step"):
                built.begin_step(0.0, 1)

        in_retry(run, act)


# Misuse ------------------------------------------------------------------------------------------


def test_calls_in_the_wrong_place_are_rejected(tmp_path: Path) -> None:
    with process(tmp_path, clean=False) as run:
        with refused(TrainingError, "outside the function that run.retry calls"):
            run.build(build)

        def twice() -> None:
            run.build(build)
            run.build(build)

        with refused(TrainingError, "run.build() was called twice in one world"):
            in_retry(run, twice)


def test_build_after_the_state_was_restored_is_rejected(tmp_path: Path) -> None:
    with process(tmp_path, clean=False) as run:
        run.loader(DataLoader(dataset(), batch_size=10))

        def late() -> None:
            assert run.is_main
            run.build(build)

        with refused(TrainingError, "run.build() is called too late"):
            in_retry(run, late)


def test_build_without_checkpoints_or_with_wrap_is_rejected(tmp_path: Path) -> None:
    with run_of(None, clean=False) as run, refused(ConfigError, "needs checkpoints"):
        in_retry(run, lambda: run.build(build))
    with process(tmp_path, clean=False) as run:

        def both() -> None:
            run.build(build)
            run.wrap(network())

        with refused(ConfigError, "run.wrap() cannot be used in addition to run.build()"):
            in_retry(run, both)


def unsharded(mesh: DeviceMesh) -> Any:
    return network()


def partly(mesh: DeviceMesh) -> Any:
    model = network()
    fully_shard(model.get_submodule("0"), mesh=mesh)
    return model


def tensor_parallel(mesh: DeviceMesh) -> Any:
    return parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": ColwiseParallel()})


def optimizer_first(mesh: DeviceMesh) -> Any:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=mesh)
    return model, optimizer


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (unsharded, "model: '0.weight' is trained but not sharded"),
        (partly, "model: '2.weight' is trained but not sharded"),
        (tensor_parallel, "model is sharded, but not by fully_shard"),
        (optimizer_first, "parameter 0 of optimizer is in no returned module"),
        (lambda mesh: None, "the function of run.build() returned None"),
        (lambda mesh: (build(mesh)[0], 7), "returned a int, which has no state_dict"),
        (lambda mesh: build(mesh)[1], "the function of run.build() returned no module"),
    ],
)
def test_an_untrainable_model_is_rejected_by_build(
    tmp_path: Path, fn: Callable[[DeviceMesh], Any], message: str
) -> None:
    with process(tmp_path, clean=False) as run, refused(ConfigError, message):
        in_retry(run, lambda: run.build(fn))


def test_wrap_of_a_sharded_module_suggests_build(tmp_path: Path) -> None:
    with process(tmp_path, clean=False) as run:

        def wraps() -> None:
            run.wrap(run.build(lambda mesh: build(mesh)[0]))

        with refused(ConfigError, "run.build"):
            in_retry(run, wraps)


# The end of a world ------------------------------------------------------------------------------


def leave_a_world(folder: Path) -> None:
    with process(folder, clean=False) as run:
        held: dict[str, Any] = {}
        in_retry(
            run, lambda: held.update(zip(("model", "optimizer"), run.build(build), strict=True))
        )
        job = parts_of(run).session.job
        first = weakref.ref(next(iter(held["model"].parameters())))
        job.retire_built()
        assert job.built is None and job.remains is not None
        assert job.remains.collect() > 0  # the script still has them
        for use in (
            lambda: held["model"](torch.ones(1, 4).double()),
            lambda: held["model"].get_submodule("0")(torch.ones(1, 4).double()),
            lambda: held["optimizer"].step(),
            lambda: held["model"].state_dict(),
        ):
            with refused(TrainingError, "was built in generation 1, which has ended") as error:
                use()  # type: ignore[no-untyped-call]
            assert "model, optimizer = run.build(build)" in str(error.value)
        held.clear()
        del error, use
        # As in every recovery: discard the update.
        parts_of(run).session.optimizer_watch.reset()
        assert job.remains.collect() == 0
        gc.collect()
        assert first() is None


def leave_a_world_at_once(folder: Path) -> None:
    """A full collection takes 0.13 s of CPU, during which training stops."""
    with process(folder, clean=False) as run:
        first: list[weakref.ref[torch.Tensor]] = []

        def act() -> None:
            model, _ = run.build(build)
            first.extend(weakref.ref(parameter) for parameter in model.parameters())

        in_retry(run, act)
        looked_at: list[int] = []

        def note(phase: str, info: dict[str, int]) -> None:
            if phase == "start" and info["generation"] == 2:
                looked_at.append(len(gc.get_objects()))

        gc.disable()  # only explicit collections
        gc.callbacks.append(note)
        job = parts_of(run).session.job
        everything = len(gc.get_objects()) + gc.get_freeze_count()
        job.retire_built()
        assert job.remains is not None
        assert any(reference() is not None for reference in first)  # in reference cycles
        job.remains.warn_if_in_memory()
        assert all(reference() is None for reference in first)
        assert len(looked_at) == 1 and looked_at[0] < everything / 4, (looked_at, everything)


@pytest.mark.parametrize("leave", [leave_a_world, leave_a_world_at_once])
def test_objects_of_an_ended_world_raise_and_free_their_memory(
    tmp_path: Path, leave: Callable[[Path], None]
) -> None:
    """In a separate process: other tests may leave references to parameters in torch."""
    code = (
        f"import sys, pathlib; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import test_built_models as t; t.{leave.__name__}(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = run_forked(command, timeout_s=PATIENCE_S)
    assert done.returncode == 0, done.stderr


def test_a_model_on_the_mesh_of_another_world_is_rejected(tmp_path: Path) -> None:
    with process(tmp_path, clean=False) as run:
        meshes: list[DeviceMesh] = []

        def keeps(mesh: DeviceMesh) -> Any:
            meshes.append(mesh)
            return build(meshes[0])

        in_retry(run, lambda: run.build(keeps))
        parts_of(run).session.job.retire_built()
        with refused(ConfigError, "is sharded over the mesh of an ended world"):
            in_retry(run, lambda: run.build(keeps))


def test_an_operation_on_a_model_of_an_ended_world_does_not_affect_the_next_one(
    tmp_path: Path,
) -> None:
    """torch returns the result of an operation on the mesh with which it was first called."""
    with process(tmp_path, clean=False) as run:
        kept: list[torch.Tensor] = []

        def keeps(mesh: DeviceMesh) -> Any:
            model, optimizer = build(mesh)
            kept.append(next(model.parameters()))
            return model, optimizer

        in_retry(run, lambda: run.build(keeps))
        parts_of(run).session.job.retire_built()
        nn.Parameter(kept[0].detach())
        in_retry(run, lambda: run.build(keeps))
        assert kept[1].device_mesh is not kept[0].device_mesh  # type: ignore[attr-defined]


def test_a_mesh_over_part_of_the_world_is_rejected() -> None:
    class Halved:
        """A mesh of twice as many ranks."""

        def size(self) -> int:
            return 2

    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        model, _ = build(init_device_mesh("cpu", (1,)))
        with refused(ConfigError, "but the world has 2 ranks in one dimension"):
            Built(model, Halved(), generation=1)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("memory", "first", "for_built_models"),
    [(None, None, 10), (True, 10, 10), (3, 3, 3), (False, None, None)],
)
def test_memory_is_the_default_of_built_models_only(
    tmp_path: Path, memory: int | bool | None, first: int | None, for_built_models: int | None
) -> None:
    manager = CheckpointManager(
        Checkpoints(tmp_path, memory=memory), Journal(folder=None, identity={})
    )
    try:
        assert manager.first_memory_step == first
        manager.keep_shards_in_memory()
        assert manager.first_memory_step == for_built_models
    finally:
        manager.close(0.0)
