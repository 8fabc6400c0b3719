"""Python processes that are forked from one that has imported torch: seconds of CPU time less each.

``import torch`` and what torch's optimizers import take three seconds, this project's agent and
worker another 0.4 s each, and a test cluster starts dozens of both. A fork server imports all of
that once; a :class:`ForkedPopen` is a Popen of ``python -m module``, ``python -c code`` or ``python
script.py`` whose process is a fork of the server instead of a new interpreter. Otherwise a program
cannot distinguish it from a new process: it is a child of the requesting process, with the
requested environment, arguments, descriptors and session (also in ``/proc``).

Modules read the server's environment at import; this project's modules read nothing
(tests/unit/repository/test_imports.py). The server does not import grpc, which workers never
import, either.
Some tests start every process as in production instead.

Forked agents fork their workers, and a forked ``elastic run`` its agents: each first forks its own
server.
"""

from __future__ import annotations

import array
import ctypes
import functools
import gc
import importlib.util
import inspect
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic.testing.forks import bound_to_parent, ending, namespace
from elastic.testing.forks.proc_area import Area
from elastic.testing.processes import react_to_signals

_WARM = (
    "encodings.idna",  # of the first connection
    "numpy.ctypeslib",
    "numpy.ma",  # of the first look at all of numpy
    "pdb",  # of the watch for debuggers
    "safetensors.torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.run",
    "torch.nn.parallel",
    "torch.optim.swa_utils",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "checkpoints.testing",
    "elastic.launcher.handler",
    "elastic.testing.pacing",
    "elastic.train.run",
)
# Of a run's log, where it is installed.
_WARM_IF_INSTALLED = ("tensorboard.summary.writer.record_writer",)
# By name: they are built on this package. Their processes are forked, too.
_STARTERS = (
    "elastic.cli.run",
    "elastic.doctor.checks",
    "elastic.launcher.launch",
)
_READ_AT_IMPORT = ("ELASTIC_STOCK_ETCD", "PYTHONPATH", "TORCH_LOGS")
SLOW_START = "SLOW_START"
"""``NODE:SECONDS``: how much later the processes of this node start, as on a cold installation."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_PADDING = "FORK_SERVER_PADDING"
_PADDING_BYTES = 64 << 10  # room for the environment of any process
_ARGUMENTS_BYTES = 4 << 10
_SIZE_BYTES = 4  # of a message, before it


class ForkServer:
    """A process that forks others; it ends with its last client."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            number, room = str(theirs.fileno()), "-" * _ARGUMENTS_BYTES
            self._process = subprocess.Popen(
                [sys.executable, "-m", "elastic.testing.forks.server", number, room],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", _PADDING: "-" * _PADDING_BYTES},
                start_new_session=True,
            )
        self.client = Client(ours)

    def close(self) -> None:
        """End the server; forked processes continue."""
        self.client.close()
        self._process.wait()


class Client:
    """A client of a fork server."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def fork(
        self, command: Sequence[str], env: Mapping[str, str], cwd: str, fds: Sequence[int]
    ) -> int:
        """Fork a child of this process that runs ``command``; returns its pid. ``fds``: its first
        three descriptors."""
        order = json.dumps({"command": list(command), "env": dict(env), "cwd": cwd}).encode()
        libc = ctypes.CDLL(None)
        with self._lock:
            # The server's child orphans it, and the kernel reparents orphans to the nearest
            # subreaper: prctl(2).
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                _send(self._connection, order, fds)
                answer = _receive(self._connection)
            finally:
                libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if answer is None:
            raise RuntimeError("the fork server has ended: its error is on stderr")
        return int(answer[0])

    def close(self) -> None:
        self._connection.close()


@functools.cache
def shared_fork_server() -> ForkServer | None:
    """The server of all tests of this process. None if the environment has ``COLD_STARTS``:
    processes then start as in production."""
    return None if os.environ.get("COLD_STARTS") else ForkServer()


class ForkedPopen(subprocess.Popen[bytes]):
    """A Popen whose process is forked by the server of ``client``, in a new session."""

    def __init__(self, client: Client, command: Sequence[str], **options: Any) -> None:
        self._client = client
        super().__init__(command, **options)

    def _execute_child(self, *arguments: Any) -> None:
        # As in subprocess.Popen on POSIX, Python 3.10 to 3.13: descriptors are numbers or -1.
        signature = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
        given = signature.bind(self, *arguments).arguments
        wanted = (given["p2cread"], given["c2pwrite"], given["errwrite"])
        fds = [number if fd == -1 else fd for number, fd in enumerate(wanted)]
        env = os.environ if given["env"] is None else given["env"]
        cwd = os.getcwd() if given["cwd"] is None else os.fspath(given["cwd"])
        self.pid = self._client.fork(given["args"], env, cwd, fds)
        self._child_created = True
        for own, childs in (
            ("p2cwrite", "p2cread"),
            ("c2pread", "c2pwrite"),
            ("errread", "errwrite"),
        ):
            if given[own] != -1:  # a pipe
                os.close(given[childs])
        if (devnull := getattr(self, "_devnull", None)) is not None:
            os.close(devnull)


def run_forked(
    command: Sequence[str], *, timeout_s: float, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Like ``subprocess.run`` with ``capture_output`` and ``text``, on the shared server if there
    is one."""
    server = shared_fork_server()
    start: Callable[..., subprocess.Popen[str]] = subprocess.Popen
    if server is not None:
        start = functools.partial(ForkedPopen, server.client)  # type: ignore[assignment]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with start(command, **pipes, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)


def can_fork(command: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether ``command`` runs this interpreter with the packages of this process."""
    _, command = namespace.split(command)
    is_same = all(env.get(name) == os.environ.get(name) for name in _READ_AT_IMPORT)
    return command[0] == sys.executable and is_same


def import_all() -> None:
    """Import what most processes of a job import."""
    for name in (*_WARM, *_STARTERS):
        importlib.import_module(name)
    for name in _WARM_IF_INSTALLED:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


# The server ---------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> Callable[[], None] | None:
    """Fork until the last client is gone, then return None. In a fork, return its program."""
    while (received := _receive(connection)) is not None:
        order, fds = received
        started, start = os.pipe()
        read, write = os.pipe()
        middle = os.fork()
        if middle == 0:
            if os.fork():
                os._exit(0)
            # First, because its client may signal the process group as soon as it has the pid.
            os.setsid()
            os.write(write, str(os.getpid()).encode())
            os.close(start)
            os.read(started, 1)  # wait until it is a child of its client
            connection.detach()
            return _become(json.loads(order), fds)
        os.close(write)
        os.waitpid(middle, 0)
        _send(connection, os.read(read, 64), ())
        for fd in (read, started, start, *fds):
            os.close(fd)
    return None


def _become(order: dict[str, Any], fds: Sequence[int]) -> Callable[[], None]:
    """Become the requested process: only the modules of the server remain."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    os.closerange(3, 1 << 16)
    os.chdir(order["cwd"])
    network, command = namespace.split(order["command"])
    parent, (interpreter, *arguments) = bound_to_parent.split(command)
    if network:
        namespace.enter(network)
    if parent:
        bound_to_parent.bind(parent)
    _ARGUMENTS.show([interpreter, *arguments])
    _ENVIRONMENT.show([f"{k}={v}" for k, v in order["env"].items()], is_whole=True)
    os.environ.clear()
    os.environ.update(order["env"])
    tempfile.tempdir = None  # read from the environment at its first use
    if arguments[0] == "-u":
        del arguments[0]
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)  # type: ignore[misc]
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = os.fdopen(number, "w", buffering=1, closefd=False)
        stream.reconfigure(write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    random.seed()
    sys.modules["numpy"].random.seed()
    _delay_start(order["env"])
    if arguments[0] == "-m":
        return lambda: _run_module(arguments[1], arguments[2:])
    if arguments[0] == "-c":
        return lambda: _run_code(arguments[1], arguments[2:])
    return lambda: _run_script(arguments[0], arguments[1:])


def _delay_start(env: Mapping[str, str]) -> None:
    node, _, delay_s = env.get(SLOW_START, "").partition(":")
    if node and node == env.get("ELASTIC_NODE_NAME"):
        time.sleep(float(delay_s))


def _run_module(name: str, arguments: list[str]) -> None:
    if _starts_others(name, arguments):
        _fork_children()
    sys.argv = [name, *arguments]
    _look_first_in(os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _starts_others(module: str, arguments: Sequence[str]) -> bool:
    """Whether ``python -m module arguments`` starts workers, agents or ranks: torchrun, an agent of
    ``elastic run``, ``elastic run``, ``elastic demo`` and ``elastic doctor``."""
    if module == "elastic.cli.main":
        return arguments[:1] in (["run"], ["demo"], ["doctor"])
    return module in ("torch.distributed.run", "elastic.cli.local_agent")


def _run_script(path: str, arguments: list[str]) -> None:
    sys.argv = [path, *arguments]
    _look_first_in(str(Path(path).resolve().parent))
    _run(compile(Path(path).read_bytes(), path, "exec"), __file__=path)


def _run_code(text: str, arguments: list[str]) -> None:
    sys.argv = ["-c", *arguments]
    _look_first_in("")
    _run(compile(text, "<string>", "exec"))


def _look_first_in(folder: str) -> None:
    """Import from the program's folder first, in place of that of the server; with
    PYTHONSAFEPATH, Python adds neither (from 3.11 on)."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder


def _run(program: types.CodeType, **names: object) -> None:
    # `import torch` runs this in every process, but torch was imported before the fork.
    vars(sys.modules["torch"])["_import_device_backends"]()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__builtins__, **names)
    exec(program, main.__dict__)


def _fork_children() -> None:
    """Fork the workers of this agent, the agents of this launcher, or the ranks and probes of this
    doctor from a separate server, which ends with this process."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    ours, theirs = socket.socketpair()
    own = os.getpid()
    if os.fork() == 0:
        ours.close()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != own:
            os._exit(0)
        os.setsid()
        # It only forks, and does not count as a process of the node.
        _ENVIRONMENT.show([])
        ending.leave(serve(theirs))
    theirs.close()
    client = Client(ours)
    names = vars(subprocess_handler)
    start = names["Popen"]

    def popen(args: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        if can_fork(args, options.get("env", os.environ)):
            return ForkedPopen(client, args, **options)
        process: subprocess.Popen[bytes] = start(args, **options)
        return process

    names["Popen"] = popen
    ours_too = types.SimpleNamespace(**{**vars(subprocess), "Popen": popen})
    for name in _STARTERS:
        vars(importlib.import_module(name))["subprocess"] = ours_too


_ARGUMENTS: Area
_ENVIRONMENT: Area


def _send(connection: socket.socket, message: bytes, fds: Sequence[int]) -> None:
    data = len(message).to_bytes(_SIZE_BYTES, "big") + message
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = connection.sendmsg([data], rights)
    connection.sendall(data[sent:])


def _receive(connection: socket.socket) -> tuple[bytes, list[int]] | None:
    """A message and its descriptors; None at the connection's end."""
    try:
        data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    except ConnectionResetError:
        return None
    if not data:
        return None
    size = int.from_bytes(data[:_SIZE_BYTES], "big") + _SIZE_BYTES
    while len(data) < size:
        data += connection.recv(1 << 16)
    return data[_SIZE_BYTES:], fds


def main(connection: socket.socket) -> None:
    """Import torch and serve."""
    global _ARGUMENTS, _ENVIRONMENT
    ending.prepare()
    _ARGUMENTS, _ENVIRONMENT = Area((48, 49)), Area((50, 51))
    react_to_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a new interpreter
    own = dict(os.environ)
    os.environ.clear()  # the strings of the kernel's block are unused from now on
    os.environ.update(own)
    import_all()
    ending.keep_modules()
    gc.collect()
    gc.freeze()  # forks share existing objects
    ending.leave(serve(connection))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
