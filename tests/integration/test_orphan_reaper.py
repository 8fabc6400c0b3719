"""The orphan reaper terminates an agent's workers if, and only if, the agent dies abruptly."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from pathlib import Path

import pytest

from elastic.agent.reaper import MARK, SETTLE_S, ForkMark, end_strays, kill_group, marked_processes
from elastic.testing.processes import is_alive
from elastic.testing.waiting import eventually

AGENT = textwrap.dedent(
    """
    import os, subprocess, sys, time
    from elastic.agent.reaper import OrphanReaper
    reaper = OrphanReaper(os.environ["TOKEN"], os.environ.get("LINK", ""),
                         os.environ.get("MEMORY", ""), os.environ.get("ENDING", ""))
    environment = dict(os.environ, ELASTIC_NODE_ID=os.environ["TOKEN"])
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    for code in ("import time; time.sleep(600)", stubborn):
        subprocess.Popen([sys.executable, "-S", "-c", code], env=environment,
                         start_new_session=True)
    print("up", reaper.pid, flush=True)
    for line in sys.stdin:
        if line.startswith("release"):
            reaper.release()
            break
        if line.startswith("supervise"):
            reaper.supervise()
        else:
            reaper.permit(time.clock_gettime(time.CLOCK_BOOTTIME) + float(line.split()[1]))
        print("done", flush=True)
    """
)


def ignores_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    ignored = next(line for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


class FakeAgent:
    def __init__(self) -> None:
        self.token = uuid.uuid4().hex
        environment = {k: v for k, v in os.environ.items() if k != MARK}
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT],
            env={**environment, "TOKEN": self.token},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.reaper_pid = int(self.process.stdout.readline().split()[1])
        eventually(lambda: len(marked_processes(self.token)) == 2)
        eventually(lambda: ignores_sigterm(self.reaper_pid))

    def permit(self, for_s: float) -> None:
        """Extend the workers' permission to train by this time."""
        self._call(f"permit {for_s}")

    def supervise(self) -> None:
        self._call("supervise")

    def _call(self, line: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def start_worker(self) -> None:
        """Start another worker with the agent's mark."""
        environment = {**os.environ, MARK: self.token}
        command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        self.extra = subprocess.Popen(command, env=environment, start_new_session=True)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in marked_processes(self.token):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def agent() -> FakeAgent:
    return FakeAgent()


def test_workers_of_a_killed_agent_and_the_reaper_end(agent: FakeAgent) -> None:
    try:
        agent.process.kill()
        agent.process.wait()
        eventually(lambda: not marked_processes(agent.token))
        eventually(lambda: not Path(f"/proc/{agent.reaper_pid}").exists())
    finally:
        agent.end()


def test_the_shared_memory_of_a_killed_agent_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other folder given in its place."""
    for name, stays in (("elastic-memory-1-2-3-ab", False), ("precious", True)):
        folder = tmp_path / name
        (folder / "own").mkdir(parents=True)
        monkeypatch.setenv("MEMORY", str(folder))
        agent = FakeAgent()
        try:
            assert folder.exists()
            agent.process.kill()
            agent.process.wait()
            eventually(lambda pid=agent.reaper_pid: not Path(f"/proc/{pid}").exists())  # type: ignore[misc]
            assert folder.exists() is stays
        finally:
            agent.end()


def test_the_link_of_a_killed_agent_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "elastic-x1y2"
    folder.mkdir()
    (folder / "link").touch()
    monkeypatch.setenv("LINK", str(folder / "link"))
    agent = FakeAgent()
    try:
        agent.process.kill()
        agent.process.wait()
        eventually(lambda: not folder.exists())
    finally:
        agent.end()


def test_workers_end_if_the_agent_dies_after_sigterm(agent: FakeAgent) -> None:
    try:
        os.kill(agent.reaper_pid, signal.SIGTERM)  # as a group-wide signal would: ignored
        agent.process.terminate()
        agent.process.wait()
        eventually(lambda: not marked_processes(agent.token))
    finally:
        agent.end()


def test_processes_of_an_agent_that_exits_gracefully_are_kept(agent: FakeAgent) -> None:
    try:
        assert agent.process.stdin is not None
        agent.process.stdin.write("release\n")
        agent.process.stdin.flush()
        agent.process.wait(timeout=60)
        eventually(lambda: not Path(f"/proc/{agent.reaper_pid}").exists())
        assert len(marked_processes(agent.token)) == 2
    finally:
        agent.end()


FORKING_AGENT = textwrap.dedent(
    """
    import os, signal, sys, time
    from elastic.agent.reaper import OrphanReaper
    reaper = OrphanReaper(os.environ["TOKEN"])
    def tell(name, value):  # in one write: two processes do so at once
        os.write(1, f"{name} {value}\\n".encode())
    kinds = {}
    for kind in ("worker", "bystander"):
        kinds[kind] = os.fork()
        if kinds[kind] == 0:
            reaper.after_fork(is_worker=kind == "worker")
            if kind == "worker":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                grandchild = os.fork()
                if grandchild:
                    tell("grandchild", grandchild)
            else:
                tell("bystander", os.getpid())  # only now it has let go of the mark
            time.sleep(600)
            os._exit(0)
    tell("reaper", reaper.pid)
    tell("worker", kinds["worker"])
    tell("mark", reaper.forked)
    sys.stdin.readline()
    """
)


def test_only_forked_workers_of_a_killed_agent_are_terminated() -> None:
    token = uuid.uuid4().hex
    agent = subprocess.Popen(
        [sys.executable, "-c", FORKING_AGENT],
        env={**{k: v for k, v in os.environ.items() if k != MARK}, "TOKEN": token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert agent.stdout is not None
    said = dict(agent.stdout.readline().split() for _ in range(5))
    workers = [int(said["worker"]), int(said["grandchild"])]
    try:
        assert marked_processes(token) == []  # their environment has no mark
        marked = marked_processes(token, ForkMark.parse(said["mark"]))
        assert sorted(marked) == sorted([agent.pid, *workers])
        agent.kill()
        agent.wait()
        eventually(lambda: not any(is_alive(pid) for pid in workers))
        eventually(lambda: not Path(f"/proc/{said['reaper']}").exists())
        assert is_alive(int(said["bystander"]))
    finally:
        os.killpg(agent.pid, signal.SIGKILL)


def test_a_forked_data_worker_of_a_dead_worker_is_a_stray() -> None:
    """Workers that run a function share the agent's process group."""
    inherited, unused = os.pipe()
    mark = ForkMark.of(inherited)
    worker = os.fork()
    if worker == 0:
        data_worker = os.fork()
        if data_worker == 0:
            time.sleep(600)
        os.write(unused, f"{data_worker} ".encode())
        time.sleep(600)
    data_worker = int(os.read(inherited, 20))
    try:
        assert end_strays("no such node", mark) == 0
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        assert end_strays("no such node", mark) == 1
        eventually(lambda: not is_alive(data_worker))
    finally:
        for pid in (worker, data_worker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.close(inherited)
        os.close(unused)


WORKER = textwrap.dedent(
    """
    import subprocess, sys
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    data_worker = subprocess.Popen(sleep)
    service = subprocess.Popen(sleep, start_new_session=True)
    print(data_worker.pid, service.pid, flush=True)
    sys.stdin.read()
    """
)


def test_strays_of_a_dead_worker_end_but_services_in_own_sessions_survive() -> None:
    token = uuid.uuid4().hex
    worker = subprocess.Popen(
        [sys.executable, "-S", "-c", WORKER],
        env={**os.environ, MARK: token},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert worker.stdout is not None
    data_worker, service = map(int, worker.stdout.readline().split())
    try:
        eventually(lambda: len(marked_processes(token)) == 3)
        assert end_strays(token) == 0, "the worker lives: nothing is a stray"
        worker.kill()
        worker.wait()
        assert end_strays(token) == 1
        eventually(lambda: marked_processes(token) == [service])
        assert data_worker != service
    finally:
        worker.kill()
        for pid in marked_processes(token):
            os.kill(pid, signal.SIGKILL)


def test_workers_of_a_frozen_agent_end_when_their_permission_expires(agent: FakeAgent) -> None:
    """These are workers of an unmodified script, which does not check the permission."""
    try:
        agent.permit(3600.0)
        agent.permit(1.0)
        os.kill(agent.process.pid, signal.SIGSTOP)
        eventually(lambda: not marked_processes(agent.token))
        assert Path(f"/proc/{agent.reaper_pid}").exists()
        os.kill(agent.process.pid, signal.SIGCONT)
        agent.permit(3600.0)  # it resumes, with the reaper active: its new workers survive
        agent.start_worker()
        with pytest.raises(subprocess.TimeoutExpired):
            agent.process.wait(2 * SETTLE_S)
        assert len(marked_processes(agent.token)) == 1
        agent.process.kill()
        agent.process.wait()
        eventually(lambda: not is_running(agent.reaper_pid))
    finally:
        agent.end()


def test_workers_with_an_extended_permission_keep_running(agent: FakeAgent) -> None:
    try:
        agent.permit(1.0)
        agent.permit(3600.0)
        time.sleep(1.5)  # past the end of the first permission; there is no event to wait for
        assert len(marked_processes(agent.token)) == 2
    finally:
        agent.end()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_reaper_that_was_killed_or_stopped_is_replaced(
    agent: FakeAgent, signum: signal.Signals
) -> None:
    try:
        agent.permit(3600.0)
        os.kill(agent.reaper_pid, signum)
        eventually(lambda: state_of(agent.reaper_pid) in ("T", "Z", ""))
        agent.supervise()  # as the agent does while workers run, whether etcd answers or not
        agent.process.kill()
        agent.process.wait()
        eventually(lambda: not marked_processes(agent.token))
        eventually(lambda: not is_running(agent.reaper_pid))
    finally:
        agent.end()


SEMAPHORES = """
import multiprocessing, os, time
if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    semaphores = [context.Semaphore() for _ in range(3)]
    context.Process(target=time.sleep, args=(0,)).start()
    print(*(s._semlock.name for s in semaphores), flush=True)
    time.sleep(600)
"""


def test_named_semaphores_of_a_killed_worker_are_removed(tmp_path: Path) -> None:
    """Only its resource tracker knows them: it must outlive the worker's other processes."""
    script = tmp_path / "worker.py"
    script.write_text(SEMAPHORES)
    token = uuid.uuid4().hex
    worker = subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, MARK: token},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert worker.stdout is not None
    files = [Path(f"/dev/shm/sem.{name.lstrip('/')}") for name in worker.stdout.readline().split()]
    assert len(files) == 3 and all(file.exists() for file in files)
    worker.kill()
    kill_group(worker.pid)
    worker.wait()
    end_strays(token)
    eventually(lambda: not any(file.exists() for file in files))
    eventually(lambda: not any(is_of_group(p, worker.pid) for p in Path("/proc").glob("[0-9]*")))


def is_of_group(process: Path, leader: int) -> bool:
    try:
        return os.getpgid(int(process.name)) == leader
    except OSError:
        return False


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")
