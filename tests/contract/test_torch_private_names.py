"""torch's private names: confined to a few modules, checked before training, and functional in
workers."""

from __future__ import annotations

import ast
import datetime
import functools
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from elastic import torch_private
from elastic.errors import ConfigError
from elastic.launcher import torch_agent
from elastic.launcher.entrypoint import create_handler
from elastic.testing.forks.server import run_forked
from elastic.testing.waiting import PATIENCE_S
from elastic.train.ddp import ElasticDDP

REPOSITORY = Path(__file__).parents[2]
# Modules that may use private names.
PLACES = {
    "elastic/launcher/torch_agent.py",
    "elastic/launcher/entrypoint.py",  # must import nothing heavy; optional
    "elastic/torch_private.py",
    "elastic/torch_fsdp.py",
    "checkpoints/torch_private.py",
    "elastic/groups/group.py",  # NCCL's abort
    "tests/kit/nccl_semantics.py",  # a backend of torch's kind, for tests
    "tests/kit/device_stream.py",  # its device
}
# By file: names that are not torch's, or are read with a default.
ELSEWHERE = {
    "elastic/cli/arguments.py": {"_actions"},  # argparse
    "elastic/cli/kube.py": {"_ActionsContainer"},  # argparse
    "elastic/testing/forks/server.py": {"_devnull"},  # subprocess
    "elastic/testing/small_world/worker.py": {"_clear", "_run_exitfuncs"},  # atexit
}
# By file outside of these: attributes that are replaced in other modules and classes.
REPLACED = {
    "elastic/groups/pending.py": {"dist.Work.wait", "sys.excepthook"},  # with an end
    "elastic/groups/faults.py": {"sys.excepthook"},  # reports the error, then calls the other one
    # Accelerate's first process group is deferred; a new main process begins trackers.
    "elastic/integrations/accelerate.py": {
        "LocalSGD.__enter__",  # refused
        "PartialState.__init__",
        "PartialState.on_main_process",
    },
    "elastic/integrations/fabric.py": {"rank_zero_only.rank"},  # of the current world
    "elastic/integrations/transformers.py": {
        "trainer.skip_first_batches"
    },  # of a loader of the job
    "elastic/hangs/page.py": {"pdb.Pdb.interaction"},  # a debugger prompt is not a hang
    # Processes that become another program: its arguments and files.
    "elastic/testing/forks/server.py": {
        "sys.__stdin__",
        "sys.argv",
        "sys.stdin",
        "tempfile.tempdir",
    },
    "elastic/testing/small_world/recording.py": {
        "run.Attempt.__exit__",  # to end a checked script after its last step
    },
    "elastic/testing/small_world/worker.py": {
        "run.start_components",  # to know the run that the script joins
        "sys.argv",
        "sys.stderr",
        "sys.stdout",
    },
}
# os, sys, namedtuple: documented there; the order of groups in a help text.
OF_PYTHON = {"_exit", "_getframe", "_asdict", "_make", "_action_groups"}


# Attributes of torch's objects: on anything but ``self`` these are torch's, even if this project
# defines the name, too. A string with such a name is for getattr or for a ``__dict__``.
OF_OBJECTS = {
    name
    for name in (*vars(torch.nn.Module()), *dir(torch.Tensor))
    if name.startswith("_") and not name.startswith("__")
}
GETTERS = {"attrgetter", "methodcaller"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache  # the walk is most of the scan's work
def nodes(tree: ast.Module) -> list[ast.AST]:
    return list(ast.walk(tree))


def own_names(trees: list[ast.Module]) -> set[str]:
    """Every name that this project defines, in any class or function."""
    names: set[str] = set()
    for node in (node for tree in trees for node in nodes(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and root_of(node) in ("self", "cls")
        ):
            names.add(node.attr)
    return names


def root_of(node: ast.expr) -> str:
    """The variable at the beginning of ``a.b().c[0].d``."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def called(node: ast.Call) -> str:
    """The last name of the called function: ``getattr`` also for ``builtins.getattr``."""
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def foreign_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """The private names in a module that belong to another package."""
    of_torch: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
            of_torch |= {a.asname or "torch" for a in node.names if a.name.startswith("torch")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
            of_torch |= {alias.asname or alias.name for alias in node.names}
        else:
            continue
        for path in imported:
            yield from (p for p in path.split(".") if path.startswith("torch") and is_private(p))
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            is_of_object = node.attr in OF_OBJECTS and root_of(node) not in ("self", "cls")
            if root_of(node) in of_torch or node.attr not in own or is_of_object:
                yield node.attr
        elif isinstance(node, ast.Constant) and node.value in OF_OBJECTS:
            yield str(node.value)
        elif isinstance(node, ast.Call) and (
            called(node).endswith("attr") or called(node) in GETTERS
        ):
            words = [a.value for a in node.args if isinstance(a, ast.Constant)]
            yield from (w for w in words if isinstance(w, str) and is_private(w) and w not in own)


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """The object and the name of each attribute that a statement replaces, in any form."""
    match node:
        case ast.Attribute(value=owner, attr=name, ctx=ast.Store() | ast.Del()):
            yield owner, name
        case ast.Subscript(
            value=ast.Call(func=ast.Name(id="vars"), args=[owner])
            | ast.Attribute(value=owner, attr="__dict__"),
            slice=slice,
            ctx=ast.Store() | ast.Del(),
        ):
            yield owner, ast.unparse(slice).strip("'")
        case ast.Call(
            func=ast.Name(id="setattr" | "delattr"), args=[owner, ast.Constant(value=str(name)), *_]
        ):
            yield owner, name


def replaced_names(tree: ast.Module) -> Iterator[str]:
    """Attributes of other modules and classes that a module replaces, by its import names."""
    of_others: set[str] = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            of_others |= {(a.asname or a.name).partition(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            of_others |= {alias.asname or alias.name for alias in node.names}
    for node in nodes(tree):
        for owner, name in assigned(node):
            path = ast.unparse(owner).split(".")
            if path[0] in of_others and all(part.isidentifier() for part in path):
                yield ".".join([*path, name])


@functools.cache
def parsed() -> dict[str, ast.Module]:
    """Every module of this project, by its path."""
    return {
        str(path.relative_to(REPOSITORY)): ast.parse(path.read_text())
        for top in ("elastic", "checkpoints", "tests/kit")
        for path in (REPOSITORY / top).rglob("*.py")
    }


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    own = own_names(list(parsed().values()))
    found = {
        path: names
        for path, tree in parsed().items()
        if path not in PLACES
        and not path.startswith("elastic/integrations/")  # names of frameworks; checked there
        and (names := set(foreign_names(tree, own)) - OF_PYTHON - ELSEWHERE.get(path, set()))
    }
    assert found == {}


def test_replaced_attributes_of_other_modules_are_listed() -> None:
    found = {
        path: names
        for path, tree in parsed().items()
        if path not in PLACES and (names := set(replaced_names(tree)))
    }
    assert found == REPLACED


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed as dist\ndist.Work.wait = None",
        "from torch.distributed.elastic import events\nvars(events)['record'] = None",
        "from torch import nn\nnn.Module.__dict__['forward'] = None",
        "import torch\nsetattr(torch, 'compile', None)",
        "def f():\n    import pdb\n    pdb.Pdb.interaction = None",
    ],
)
def test_the_scan_finds_replaced_attributes(code: str) -> None:
    assert len(list(replaced_names(ast.parse(code)))) == 1
    assert not list(replaced_names(ast.parse("import os\nos.environ['X'] = ''")))


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch._foreach_add_([], 1)",
        "import torch.distributed as dist\ndist.distributed_c10d._world.pg_map",
        "from torch.distributed.distributed_c10d import _world",
        "from torch._C._distributed_c10d import HashStore",
        "def f(loader): return loader._index_sampler",
        "def f(loader): return getattr(loader, '_index_sampler', None)",
        "from operator import attrgetter\nf = attrgetter('_index_sampler')",
        "class Own:\n    def f(self, part):\n        self._buffers = part._buffers",
        "TABLES = ('_forward_hooks', '_backward_hooks')",
    ],
)
def test_the_scan_finds_private_names(code: str) -> None:
    assert list(foreign_names(ast.parse(code), {"_world", "_own"}))
    assert not list(foreign_names(ast.parse("def f(x): return x._own"), {"_own"}))


def test_every_overridden_private_method_of_ddp_is_checked() -> None:
    kind = DistributedDataParallel
    methods = {name for name, method in vars(ElasticDDP).items() if callable(method)}
    replaced = {name for name in methods if is_private(name) and hasattr(kind, name)}
    looked_for = {path.rpartition(".")[2] for path in torch_private.NAMES}
    assert replaced <= looked_for
    assert {"_distributed_broadcast_coalesced", "_set_static_graph"} <= replaced


def test_the_installed_torch_has_all_private_names() -> None:
    torch_private.check()
    torch_agent.check()


def test_missing_names_are_reported_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._foreach_mul_")
    monkeypatch.delattr("torch.utils.data.DataLoader._get_iterator")
    with pytest.raises(ConfigError) as caught:
        torch_private.check()
    message = str(caught.value)
    assert "torch._foreach_mul_, torch.utils.data.DataLoader._get_iterator" in message
    assert torch.__version__ in message and torch_private.SUPPORTED in message
    assert "pip install" in caught.value.hint


JOINS = """
import torch
import elastic
from torch.distributed import distributed_c10d
del distributed_c10d._get_default_group
try:
    elastic.join()
except elastic.ConfigError as error:
    print(error)
"""


def test_join_rejects_a_torch_that_lacks_a_private_name() -> None:
    done = run_forked([sys.executable, "-c", JOINS], timeout_s=PATIENCE_S)
    assert "lacks what elastic.join() needs" in done.stdout, done.stderr
    assert "distributed_c10d._get_default_group" in done.stdout


@pytest.mark.parametrize("lacking", ["method", "key"])
def test_the_handler_rejects_a_torch_that_lacks_a_private_name(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking == "method":
        for kind in (LocalElasticAgent, SimpleElasticAgent):
            if "_shutdown" in vars(kind):
                monkeypatch.delattr(kind, "_shutdown")
        named = "LocalElasticAgent._shutdown"
    else:
        monkeypatch.setattr("torch.distributed.elastic.utils.store._NUM_MEMBERS", "/members")
        named = "terminal_state/num_members"
    # No etcd listens there: the check must fail before a connection is made.
    parameters = RendezvousParameters("etcd-v3", "127.0.0.1:1", "run", 1, 1, local_addr=None)
    with pytest.raises(BaseException, match="lacks what the rendezvous handler needs") as caught:
        create_handler(parameters)
    assert named in str(caught.value)


def test_an_untested_torch_version_causes_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    logger, records = logging.Logger("agent"), list[logging.LogRecord]()
    monkeypatch.setattr(logger, "handle", records.append)
    monkeypatch.setattr(torch_agent, "get_logger", lambda: logger)
    torch_agent.check()
    assert records == []
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    torch_agent.check()
    assert [record.levelname for record in records] == ["WARNING"]
    assert "2.99.0" in records[0].getMessage()


# Use of private names in workers.


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A world of one."""
    torch_private.forget_group_count()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield torch_private.default_group()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_groups_timeout_is_set_without_a_warning(group: dist.ProcessGroup) -> None:
    backend = group._get_backend(torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_private.set_group_timeout(datetime.timedelta(seconds=77))
        assert backend.options._timeout == datetime.timedelta(seconds=77)
        torch_private.set_backend_timeout(backend, datetime.timedelta(seconds=78))
    assert backend.options._timeout == datetime.timedelta(seconds=78)


def test_groups_are_named_as_if_each_were_the_first(group: dist.ProcessGroup) -> None:
    name = group.group_name
    dist.destroy_process_group()
    torch_private.forget_group_count()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert torch_private.default_group().group_name == name
    torch_private.abort_groups()
    assert not dist.is_initialized()


def test_backward_passes_are_numbered_and_report_their_end() -> None:
    seen: list[int] = []
    ended: list[int] = []

    def hook(gradient: torch.Tensor) -> None:
        seen.append(torch_private.current_backward())
        torch_private.call_after_backward(lambda: ended.append(seen[-1]))

    for _ in range(2):
        x = torch.ones(1, requires_grad=True)
        x.register_hook(hook)  # type: ignore[no-untyped-call]
        (2 * x).backward()  # type: ignore[no-untyped-call]
    assert torch_private.current_backward() == -1
    assert -1 not in seen and len(set(seen)) == 2 and ended == seen


def test_the_state_of_a_scaler_is_restored() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)

    def step() -> float:
        scaler.scale(parameter.sum()).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        return float(scaler.get_scale())

    step()
    taken = {name: value.clone() for name, value in torch_private.scales_of(scaler).items()}
    after = step()
    torch_private.set_scales(scaler, taken)
    assert step() == after


def test_the_iterator_of_persistent_workers_is_found_and_discarded() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(4, 1))
    loader = DataLoader(data, num_workers=1, persistent_workers=True)
    assert torch_private.iterates_as_torch_does(type(loader))
    assert torch_private.unread_tasks(loader) == ()
    first = iter(loader)
    next(first)
    assert len(torch_private.unread_tasks(loader)) == 1
    torch_private.forget_iterator(loader)
    assert torch_private.unread_tasks(loader) == ()
    assert iter(loader) is not first


def test_compiled_models_skip_marked_functions() -> None:
    code = (
        "import torch\n"
        "from elastic.torch_private import exclude_from_dynamo\n"
        "from torch._C._dynamo import eval_frame\n"
        "called = []\n"
        "eval_frame.set_code_exec_strategy = lambda *given: called.append(given)\n"
        "exclude_from_dynamo((lambda: 1).__code__, is_recursive=True)\n"
        "print(len(called))"
    )
    done = run_forked([sys.executable, "-c", code], timeout_s=PATIENCE_S)
    assert done.stdout.strip() == "1", f"this torch has other names for it: {done.stderr}"
