"""Random failures of workers, failed builds and changes of the leader: what the script did once is
counted once, by the leader's list of nodes, the decision and the accounting together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st
from kit.membership_nodes import NOW, node

from elastic.agent.accounting import Broken, FailureAccounting
from elastic.agent.liveness import Connections, Verdict
from elastic.agent.roster import Roster
from elastic.membership.budget import StopJob
from elastic.membership.decision import decide, world_of
from elastic.membership.records import FailureReport, Keys, Node, NodeState, WorldRecord
from elastic.membership.view import Liveness, Policy, Proposal, StepRate, classify_members
from elastic.tuning.options import AgentOptions

KEYS = Keys.of("/elastic", "job")
LIMITS = (1, 3)
POLICY = Policy(min_nodes=1, max_nodes=3)
OPTIONS = AgentOptions(quarantine_s=1.0, failure_budget=100)
NAMES = ("n1", "n2", "n3")
LATER_S = 20.0  # a decision waits for no longer than this for the cause of a failure


@dataclass
class Job:
    """Three nodes whose workers make no step: each failure is the script's own."""

    now: float = NOW
    world: WorldRecord | None = None
    since_s: float = NOW
    nodes: dict[str, Node] = field(default_factory=dict)
    failures: int = 0  # of workers, as they happened
    stop: StopJob | None = None

    def __post_init__(self) -> None:
        self.nodes = {name: node(name, limits=LIMITS) for name in NAMES}
        self.elect()
        self.lead()

    def elect(self) -> None:
        """The new leader knows the keys, and what the last one has recorded in the world."""
        self.roster, self.accounting = Roster(KEYS, Connections()), FailureAccounting(OPTIONS)
        self.accounting.remember(self.world, self.now, self.now)
        for record in self.nodes.values():
            self.roster.put(record, 1, self.now)
            self.roster.resolve(record.node_id, Verdict(Liveness.ALIVE, "answers"), self.now)

    def put(self, name: str, **fields: object) -> None:
        self.nodes[name] = replace(self.nodes[name], **fields)  # type: ignore[arg-type]
        self.roster.put(self.nodes[name], 1, self.now)

    def fail(self, name: str, *, in_build: bool) -> None:
        """Its workers raise an exception, in their world or as they build the next one."""
        running = self.nodes[name].running
        if running is None or self.world is None:
            return
        self.failures += 1
        left = max(running.generation, self.world.generation * in_build)
        self.put(
            name,
            state=NodeState.ARRIVED,
            in_process=False,
            running=None,
            arrived_for=left,
            failure="ValueError: bad sample 4711",
            failure_exit_code=1,
        )

    def start(self, name: str) -> None:
        """torchrun restarts its workers, or they get ready. Its record keeps the failure."""
        record = self.nodes[name]
        if record.state is NodeState.ARRIVED and record.running is None:
            self.put(name, state=NodeState.STARTING)
        elif record.state is NodeState.STARTING:
            self.put(name, state=NodeState.READY, in_process=True)

    def enter(self) -> None:
        """All members are in the newest world, and their failures are over."""
        assert self.world is not None
        of_id = {record.node_id: name for name, record in self.nodes.items()}
        members = [of_id[node_id] for node_id in self.world.node_ids]
        ready = all(self.nodes[m].state is NodeState.READY for m in members)
        if not ready and self.world.mode == "in-process":
            return
        for name in members:
            if self.nodes[name].running != self.world:
                now = {"state": NodeState.READY, "in_process": True, "running": self.world}
                self.put(name, **now, failure=None, failure_exit_code=None)

    def report(self, name: str) -> None:
        """It cannot connect to the others in the newest world."""
        assert self.world is not None
        error, generation = "GroupBuildFailed: timed out", self.world.generation
        node_id = self.nodes[name].node_id
        if self.nodes[name].running is not None and node_id in self.world.node_ids:
            record = FailureReport(node_id=node_id, generation=generation, error=error)
            self.roster.put_failure_report(KEYS.failure_report(node_id), record, self.now)

    def lead(self) -> None:
        self.now += LATER_S
        quarantined = self.accounting.flaps.quarantined(self.now)
        view = self.roster.view(self.world, self.since_s, done=None, quarantined=quarantined)
        decision = decide(view, self.now, POLICY)
        if not isinstance(decision, Proposal):
            return
        before = self.world
        if before is not None:
            members = classify_members(view, before)
            groups = [n.node.running.generation for n in members.running if n.node.running]
            broken = Broken(
                members=members,
                proposal=decision,
                since_s=self.since_s,
                failures=self.roster.failures_since(min([before.generation, *groups])),
            )
            stop = self.accounting.count(broken, StepRate(1, 100, 1.0, self.now), self.now)
            self.stop = self.stop or stop
        records = self.accounting.records(self.now, self.now)
        self.world = world_of(decision, before, nonce="ab", time_s=self.now, breakages=records)
        self.accounting.formed(before, self.world, self.now)
        self.since_s = self.now

    def counted(self) -> int:
        """The failures in all breakages."""
        return sum(len(r.failures) for r in self.accounting.records(self.now, self.now))


NAME = st.sampled_from(NAMES)
EVENT = st.one_of(
    st.tuples(st.just("fail"), NAME, st.booleans()),
    st.tuples(st.just("start"), NAME),
    st.tuples(st.just("report"), NAME),
    st.tuples(st.sampled_from(["enter", "enter", "elect", "lead", "lead"])),
)


@given(events=st.lists(EVENT, max_size=30))
def test_each_failure_is_counted_once(events: list[tuple[object, ...]]) -> None:
    job = Job()
    job.enter()
    for kind, *arguments in events:
        match kind, arguments:
            case "fail", [str(name), bool(in_build)]:
                job.fail(name, in_build=in_build)
            case "start" | "report", [str(name)]:
                getattr(job, str(kind))(name)
            case _:
                getattr(job, str(kind))()
        if kind != "lead":
            continue
        assert job.counted() <= job.failures
        if job.stop is not None:
            assert job.failures >= 3, job.stop.reason
            return
