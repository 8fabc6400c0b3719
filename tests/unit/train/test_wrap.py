"""The wrapped module: always a DDP, and a plain module where collectives would be wrong."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel

from elastic.errors import ConfigError, GroupAborted, TrainingError
from elastic.groups.collectives import ReleasableGroup
from elastic.groups.pending import pending_works
from elastic.train import ddp
from elastic.train.ddp import ElasticDDP


@pytest.fixture
def group() -> Iterator[None]:
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_of_several_refused_options_the_first_one_is_named() -> None:
    """Each time: the leader compares the texts of failures."""
    for options in (list(ddp._REFUSED), list(reversed(ddp._REFUSED))):
        with pytest.raises(ConfigError, match=rf"wrap\({options[0]}="):
            ElasticDDP(nn.Linear(1, 1), **dict.fromkeys(options))


def gradient(model: ElasticDDP) -> torch.Tensor:
    model.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    found = next(model.parameters()).grad
    assert found is not None
    return found.clone()


def test_a_wrapped_module_is_a_ddp_even_without_a_group() -> None:
    model = ElasticDDP(nn.Linear(3, 1))
    assert isinstance(model, DDP)
    assert model(torch.ones(2, 3)).shape == (2, 1)
    assert set(model.state_dict()) == {"module.weight", "module.bias"}
    with model.no_sync():
        assert gradient(model).shape == (1, 3)


@pytest.mark.usefixtures("group")
def test_a_wrapped_module_keeps_its_identity_across_worlds() -> None:
    model = ElasticDDP(nn.Linear(3, 1))
    calls = []
    model.register_forward_hook(lambda *_: calls.append("hook"))
    model.register_state_dict_pre_hook(lambda *_: calls.append("state"))  # type: ignore[no-untyped-call]
    model.my_own = "kept"  # type: ignore[assignment]
    parameter = next(model.parameters())
    expected = gradient(model)
    for _ in range(3):
        model.enter_world()
        assert torch.equal(gradient(model), expected)
        assert model.reduction.is_done
    assert next(model.parameters()) is parameter
    assert model.my_own == "kept"
    model.state_dict()
    assert calls.count("hook") == 4
    assert "state" in calls


@pytest.mark.usefixtures("group")
def test_all_reducer_collectives_use_the_releasable_group(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[str, torch.dtype]] = set()
    for name in ("broadcast", "allreduce"):
        pass_on = getattr(ReleasableGroup, name)

        def note(
            self: ReleasableGroup,
            tensors: list[torch.Tensor],
            opts: object,
            name: str = name,
            pass_on: Any = pass_on,
        ) -> Any:
            asked.add((name, tensors[0].dtype))
            return pass_on(self, tensors, opts)

        monkeypatch.setattr(ReleasableGroup, name, note)
    gradients = ("allreduce", torch.float32)
    for options, expected in (
        ({}, {gradients, ("broadcast", torch.int32)}),  # the layout of rebuilt buckets
        ({"find_unused_parameters": True}, {gradients, ("allreduce", torch.int32)}),
    ):
        model = ElasticDDP(nn.Linear(3, 1), **options)
        model.enter_world()
        gradient(model), gradient(model)
        assert asked == expected
        model.leave_world()
        asked.clear()


@pytest.mark.usefixtures("group")
def test_a_failed_backward_pass_raises_until_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ElasticDDP(nn.Linear(3, 1), find_unused_parameters=True)
    model.enter_world()
    gradient(model)
    begun: list[dist.Work] = []

    def fail() -> None:
        raise GroupAborted("the group was taken down")

    with monkeypatch.context() as patch:
        patch.setattr(pending_works(), "begin", begun.append)
        patch.setattr(pending_works(), "finish", fail)
        with pytest.raises(GroupAborted):
            gradient(model)
    assert len(begun) == 2  # bucket and map: they must end before the group is destroyed
    with pytest.raises(GroupAborted):
        gradient(model)  # in a script that swallowed the error
    model.leave_world()
    model.reduction.begin(1.0)
    model.enter_world()
    gradient(model)


@pytest.mark.usefixtures("group")
def test_the_training_flag_is_kept() -> None:
    model = ElasticDDP(nn.Sequential(nn.Linear(3, 1), nn.Dropout()).eval())
    model.enter_world()
    assert not model.training
    assert not model.module.training


@pytest.mark.usefixtures("group")
def test_gradients_are_weighted_by_the_share() -> None:
    model = ElasticDDP(nn.Linear(3, 1))
    model.enter_world()
    whole = gradient(model)
    model.reduction.begin(0.25)
    assert torch.allclose(gradient(model), whole / 4)


@pytest.mark.usefixtures("group")
def test_a_share_of_zero_yields_zero_gradients_even_for_nan() -> None:
    model = ElasticDDP(nn.Linear(3, 1))
    model.enter_world()
    model.reduction.begin(0.0)
    (model(torch.full((2, 3), torch.nan)).sum()).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


@pytest.mark.usefixtures("group")
def test_no_collectives_in_eval_mode_and_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ElasticDDP(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    model.enter_world()
    broadcasts: list[object] = []
    monkeypatch.setattr(ddp, "broadcast_tensors", lambda *a, **k: broadcasts.append(a))
    with torch.no_grad():
        model(torch.randn(4, 3))
    model.eval()
    model(torch.randn(4, 3)).sum().backward()
    assert not broadcasts
    model.train()  # type: ignore[no-untyped-call]
    model(torch.randn(4, 3))
    assert broadcasts


@pytest.mark.parametrize("option", ["process_group", "device_mesh", "mixed_precision"])
def test_unsupported_options_are_rejected(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        ElasticDDP(nn.Linear(1, 1), **{option: object()})


@pytest.mark.usefixtures("group")
def test_communication_hooks_are_rejected() -> None:
    model = ElasticDDP(nn.Linear(1, 1))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"register_comm_hook\(fp16_compress_hook\).*weights"):
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        with pytest.raises(ConfigError, match=r"FP16_COMPRESS\).*weights"):
            model._register_builtin_comm_hook("FP16_COMPRESS")
        model.enter_world()


@pytest.mark.usefixtures("group")
def test_ddp_options_are_kept_in_every_world() -> None:
    model = ElasticDDP(nn.Linear(3, 1), gradient_as_bucket_view=True, find_unused_parameters=True)
    for _ in range(2):
        model.enter_world()
        assert model.gradient_as_bucket_view
        assert model.find_unused_parameters


@pytest.mark.usefixtures("group")
def test_gradients_that_a_script_keeps_by_reference_are_not_overwritten() -> None:
    """As in DistributedDataParallel by default; views of buckets are the script's choice."""
    model = ElasticDDP(nn.Linear(3, 1))
    model.enter_world()
    for scale in (1.0, 2.0, 3.0):  # the second pass rebuilds DDP's buckets
        model.zero_grad()
        model(torch.full((2, 3), scale)).sum().backward()
        if scale == 2.0:
            kept = [p.grad for p in model.parameters()]
            values = [g.clone() for g in kept if g is not None]
    assert len(values) == 2
    assert all(g is not None and torch.equal(g, v) for g, v in zip(kept, values, strict=True))


def test_no_reference_to_a_group_remains_after_its_world() -> None:
    """A group left to the garbage collector might be collected in a forked data worker."""
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = ElasticDDP(nn.Linear(3, 1))
    model.enter_world()
    gradient(model), gradient(model)  # the second pass rebuilds DDP's buckets
    group = weakref.ref(model.process_group)
    model.leave_world()
    gc.disable()
    try:
        dist.destroy_process_group()
        assert group() is None
    finally:
        gc.enable()
    assert gradient(model).shape == (1, 3)


@pytest.mark.usefixtures("group")
def test_copies_are_independent_plain_modules() -> None:
    model = ElasticDDP(nn.Linear(3, 1))
    model.register_forward_hook(lambda *_: None)
    model.enter_world()
    target = copy.deepcopy(model)
    averaged = AveragedModel(model)
    assert not target.in_world
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert not torch.equal(next(target.parameters()), next(model.parameters()))
    averaged.update_parameters(model)
    assert gradient(target).shape == (1, 3)
    saved = io.BytesIO()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.leave_world()
    model._forward_hooks.clear()  # a lambda cannot be pickled
    torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in state.items())


def test_unsupported_modules_are_rejected_with_an_alternative() -> None:
    with pytest.raises(ConfigError, match="its process group would end") as refused:
        ElasticDDP(DDP.__new__(DDP))
    assert "run.wrap(Net().to(run.device))" in str(refused.value)


@pytest.mark.usefixtures("group")
def test_layers_that_are_unfrozen_later_are_reduced() -> None:
    model = ElasticDDP(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    model.module[0].requires_grad_(False)
    model.enter_world()
    model.reduction.begin(0.5)  # as if another rank held the other half
    first, second = model.module[0].weight, model.module[1].weight
    model(torch.ones(2, 3)).sum().backward()
    assert first.grad is None and second.grad is not None
    model.zero_grad()
    model.module[0].requires_grad_(True)
    plain = copy.deepcopy(model.module)
    plain(torch.ones(2, 3)).sum().backward()
    model(torch.ones(2, 3)).sum().backward()
    torch.testing.assert_close(first.grad, plain[0].weight.grad / 2)
    model.leave_world()


@pytest.mark.usefixtures("group")
def test_a_module_may_have_no_trainable_parameters_at_first() -> None:
    model = ElasticDDP(nn.Linear(3, 1)).requires_grad_(False)
    model.enter_world()
    assert model(torch.ones(2, 3)).shape == (2, 1)
    model.requires_grad_(True)
    model.reduction.begin(0.5)
    model(torch.ones(2, 3)).sum().backward()
    assert model.reduction.is_done
    model.leave_world()


def pass_over_ones(model: ElasticDDP, *, is_reduced: bool, factor: float = 1.0) -> list[float]:
    """The gradient of three equal weights after one more pass."""
    with contextlib.nullcontext() if is_reduced else model.no_sync():
        (factor * model(torch.ones(1, 3)).sum()).backward()
    gradients = next(model.parameters()).grad
    assert gradients is not None
    return [float(value) for value in gradients[0]]


@pytest.mark.usefixtures("group")
def test_local_gradients_keep_the_weight_of_their_step() -> None:
    model = ElasticDDP(nn.Linear(3, 1, bias=False))
    model.enter_world()
    model.begin_step(0.5)
    pass_over_ones(model, is_reduced=False)
    model.begin_step(0.25)
    both = pass_over_ones(model, is_reduced=True)
    assert both == [0.75] * 3  # 0.5 of one, 0.25 of the other
    # .grad is what the sum over the ranks has left: each rank contributes its part of it again.
    model.begin_step(0.5)
    pass_over_ones(model, is_reduced=False)
    model.begin_step(0.25)
    assert pass_over_ones(model, is_reduced=True) == [0.5 * (0.75 + 1) + 0.25] * 3
    model.leave_world()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("factor", [1.0, math.nan], ids=["a filler", "a filler with a NaN"])
def test_a_step_without_samples_adds_nothing_to_local_gradients(factor: float) -> None:
    model = ElasticDDP(nn.Linear(3, 1, bias=False))
    model.enter_world()
    model.begin_step(0.5)
    pass_over_ones(model, is_reduced=False)
    model.begin_step(0.0, has_samples=False)
    assert pass_over_ones(model, is_reduced=True, factor=factor) == [0.5] * 3
    model.begin_step(0.5)  # the next one has samples again
    model.zero_grad()
    model.reduction.forget_gradients()
    assert pass_over_ones(model, is_reduced=True) == [0.5] * 3
    model.leave_world()


@pytest.mark.usefixtures("group")
def test_equal_weights_of_ranks_apply_to_one_without_samples() -> None:
    """It has reduced gradients in ``.grad``, of which each rank contributes its part again."""
    model = ElasticDDP(nn.Linear(3, 1, bias=False))
    model.enter_world()
    model.begin_step(0.5)
    assert pass_over_ones(model, is_reduced=True) == [0.5] * 3
    model.begin_step(0.5, has_samples=False)
    assert pass_over_ones(model, is_reduced=True) == [0.25] * 3
    model.end_step()
    assert pass_over_ones(model, is_reduced=True) == [0.5 * (0.25 + 1)] * 3  # outside of steps
    model.leave_world()


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q1, self.q2 = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.q1(x), self.q2(x)])


@pytest.fixture
def critic(group: None) -> Iterator[ElasticDDP]:
    """In a step in which a loss has reached all parameters, and then another one some of them."""
    model = ElasticDDP(Critic())
    model.enter_world()
    model.earlier.begin_step()
    model.begin_step(0.5)
    model(torch.ones(1, 3)).sum().backward()
    assert model.reduction.is_complete
    model.module.q1(torch.ones(1, 3)).sum().backward()
    yield model
    model.leave_world()


def test_gradients_of_a_loss_that_reaches_some_parameters_are_not_used(critic: ElasticDDP) -> None:
    assert not critic.reduction.is_complete
    with pytest.raises(TrainingError, match="of Critic has computed gradients of only some"):
        critic.reduction.refuse_partial()


def test_gradients_of_such_a_loss_may_be_cleared(critic: ElasticDDP) -> None:
    critic.reduction.forget_gradients()  # the step is committed
    critic.earlier.begin_step()
    critic.begin_step(0.5)
    critic.zero_grad()
    critic(torch.ones(1, 3)).sum().backward()
    assert critic.reduction.is_complete
    assert [p.grad.tolist() for p in critic.parameters() if p.grad is not None] == 2 * [
        [[0.5] * 3],
        [0.5],
    ]


def test_gradients_of_such_a_loss_are_reduced_with_the_next_ones(critic: ElasticDDP) -> None:
    critic(torch.ones(1, 3)).sum().backward()
    assert critic.reduction.is_complete
    # This rank's share of all passes: reduced gradients are in .grad, too, and count once.
    assert critic.module.q1.bias.grad is not None and critic.module.q2.bias.grad is not None
    assert critic.module.q1.bias.grad.tolist() == [0.5 * (0.5 + 1 + 1)]
    assert critic.module.q2.bias.grad.tolist() == [0.5 * (0.5 + 1)]


def test_gradients_of_such_a_loss_of_an_earlier_step_are_refused(critic: ElasticDDP) -> None:
    """A death would have lost those of its rank."""
    critic.reduction.forget_gradients()
    critic.earlier.begin_step()
    critic.begin_step(0.5)
    loss = critic(torch.ones(1, 3)).sum()
    with pytest.raises(TrainingError, match="of Critic has computed gradients of only some"):
        loss.backward()


def test_a_lazy_module_is_refused_until_it_has_shapes() -> None:
    network = nn.Sequential(nn.LazyLinear(4), nn.Tanh())
    with pytest.raises(ConfigError, match=r"'0\.weight' has no shape yet") as refused:
        ElasticDDP(network)
    assert "network(example)" in refused.value.hint
    network(torch.ones(2, 3))
    assert ElasticDDP(network)(torch.ones(2, 3)).shape == (2, 4)
