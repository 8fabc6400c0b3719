"""What the text of a failure says about its cause."""

from __future__ import annotations

import builtins
import functools
import re
import signal
from dataclasses import dataclass
from enum import Enum

from elastic.hangs.verdict import Confidence
from elastic.tracebacks import exception_line, exception_name, exception_of, for_a_line

# ----------------------------------------------------------------------------
# The table of known failures: the patterns of their texts, and the meaning of each.
#
# The order matters: the first matching rule applies. Hardware comes first, because a failing GPU
# also breaks collectives; consequences of other nodes' failures precede errors of the script,
# because their texts are often wrapped in exceptions of the script.

REFUSED = "refused"
UNKNOWN = "unknown"  # no rule matches
COLLECTIVE_TIMEOUT = "collective-timeout"
GROUP_NOT_BUILT = "group-not-built"
_NO_MATCH = r"(?!)"  # a pattern that matches nowhere


class Action(str, Enum):
    """The job's action on a failure."""

    RESTART = "restart"  # the next world, with the same node
    EXCLUDE_NODE = "exclude-node"  # the next world without it, for the duration of the quarantine
    STOP = "stop"  # no attempt can succeed


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One kind of failure.

    ``is_consequence``: such a text only states that a peer is lost, or does not respond. It is
    never the reason to end a job, and the leader looks for another worker's failure. ``pattern`` is
    matched against the worker's error, ``kernel_pattern`` against the kernel's log. ``is_local``:
    the cause may be specific to one node, or common to all. Which one applies depends on whether
    the job has worked elsewhere (:func:`elastic.membership.failures.judge_failure`).
    ``restarts_if_others_work``: it ends the job only if no other node works.

    Patterns are for what the program, its libraries and the kernel write: the agent's own sentences
    about a worker's end are judged by what the agent knows.
    """

    name: str
    action: Action
    confidence: Confidence
    reason: str
    pattern: re.Pattern[str]
    kernel_pattern: re.Pattern[str]
    is_local: bool = False
    is_consequence: bool = False
    restarts_if_others_work: bool = False

    @property
    def reads_kernel_log(self) -> bool:
        """Whether the rule has a pattern for the kernel's log."""
        return self.kernel_pattern.pattern != _NO_MATCH


def _rule(
    name: str,
    action: Action,
    confidence: Confidence,
    reason: str,
    *patterns: str,
    kernel: tuple[str, ...] = (),
    is_local: bool = False,
    is_consequence: bool = False,
    restarts_if_others_work: bool = False,
) -> Rule:
    return Rule(
        name=name,
        action=action,
        confidence=confidence,
        reason=reason,
        pattern=_any_of(patterns),
        kernel_pattern=_any_of(kernel),
        is_local=is_local,
        is_consequence=is_consequence,
        restarts_if_others_work=restarts_if_others_work,
    )


def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Matches any of the patterns; nothing if there are none."""
    return re.compile("|".join(f"(?:{p})" for p in patterns) or _NO_MATCH, re.IGNORECASE)


# Codes in NVIDIA's catalogue that require a reset, a reboot or a new board: 48 and 94/95 memory,
# 62 microcontroller, 63/64 page retirement, 74 NVLink, 79 off the bus, 119/120 firmware, 140
# memory.
_XID_OF_HARDWARE = r"\bxid \([^)]*\): *(48|62|63|64|74|79|94|95|119|120|140)\b"

_FABRIC = r"(\bgloo\b|nccl|process ?group|tcpstore|watchdog|\bsocket\b|\bbarrier\b)"
_LATE = r"(timed? ?out|timeout|\bclosed|\breset|\brefused|\babort|\bstuck|unreachable)"

RULES: tuple[Rule, ...] = (
    # -- this library ----------------------------------------------------------------------------
    _rule(
        "refused-elsewhere",
        Action.RESTART,
        Confidence.HIGH,
        "another rank could not restore the state, or has left the loop",
        # elastic/train/shards.py; it quotes the other rank's error, which may match
        # any rule.
        r"trainingerror: this rank ends because rank \d+ could not restore the state",
        # elastic/train/early_leave.py
        r"trainingerror: this rank ends because ranks? [\d, and]+ left the loop",
        is_consequence=True,
    ),
    _rule(
        "left-loop",
        Action.STOP,
        Confidence.HIGH,
        "a rank leaves the loop by its own decision",
        r"left the loop (after|before) step \d+, while rank",
    ),
    _rule(
        REFUSED,
        Action.STOP,
        Confidence.HIGH,
        "this library refuses the script as it is",
        # (The ranks of a replica that did not reach each other in time: another one may have died.)
        r"^(?!.*did not call elastic\.join\(mesh=…\))(training|config)error: ",
        r"^noworld: ",
        restarts_if_others_work=True,
    ),
    # -- machines ------------------------------------------------------------------------------
    _rule(
        "gpu-hardware",
        Action.EXCLUDE_NODE,
        Confidence.HIGH,
        "a GPU of this node is faulty",
        r"uncorrectable (ecc|nvlink)",
        r"cuda_?error_?ecc_?uncorrectable",
        r"fallen off the bus",
        _XID_OF_HARDWARE,
        r"cuda error: .*(hardware stack error|nvlink was detected)",
        kernel=(_XID_OF_HARDWARE, r"nvrm: .*fallen off the bus"),
    ),
    _rule(
        "memory-hardware",
        Action.EXCLUDE_NODE,
        Confidence.HIGH,
        "the memory or a processor of this node is faulty",
        r"hardware memory corruption",
        kernel=(
            r"hardware memory corruption",
            r"\[hardware error\]:.*(uncorrected|processor context corrupt)",
            r"edac .* \d+ ue ",
        ),
    ),
    _rule(
        "gpu-driver",
        Action.EXCLUDE_NODE,
        Confidence.HIGH,
        "the GPU driver of this node does not work",
        r"driver/library version mismatch",
        r"error \(?802\)? ?: system not yet initialized|cuda_?error_?system_?not_?ready",
        r"no cuda-capable device is detected",
        r"cuda driver version is insufficient",
        r"all cuda-capable devices are busy or unavailable",
        r"unable to determine the device handle",
        r"nvidia-smi has failed because it couldn't communicate",
        r"no cuda gpus are available|no gpus found",
        is_local=True,
    ),
    _rule(
        "file-system",
        Action.EXCLUDE_NODE,
        Confidence.HIGH,
        "a file system of this node does not work",
        r"read-only file system",
        r"transport endpoint is not connected",
        r"stale (nfs )?file handle",
        r"\[errno 5\] input/output error",
        is_local=True,
    ),
    _rule(
        "disk",
        Action.EXCLUDE_NODE,
        Confidence.MEDIUM,
        "a disk of this node reports errors",
        r"critical medium error",
        kernel=(
            r"i/o error,? (on )?dev",
            r"critical (medium|target) error",
            r"remounting file ?system read-only",
            r"ext4-fs error",
            r"xfs .*(metadata i/o error|corruption|shut(ting)? ?down)",
        ),
        is_local=True,
    ),
    # (torch names a segment that it cannot write, also if the disk of /dev/shm is full.)
    _rule(
        "shared-memory",
        Action.RESTART,
        Confidence.HIGH,
        "shared memory (/dev/shm) is full: enlarge it, or use fewer data workers",
        r"killed by signal: bus error",
        r"insufficient shared memory",
        r"unable to (write to|open shared memory|resize)(?!.*too many open files).*(torch_|shared)",
    ),
    _rule(
        "disk-full",
        Action.EXCLUDE_NODE,
        Confidence.MEDIUM,
        "a disk of this node is full",
        r"no space left on device",
        is_local=True,
    ),
    _rule(
        "quota",
        Action.STOP,
        Confidence.MEDIUM,
        "the quota of a file system is exhausted",
        r"disk quota exceeded",
    ),
    # -- memory --------------------------------------------------------------------------------
    _rule(
        "gpu-out-of-memory",
        Action.RESTART,
        Confidence.MEDIUM,
        "a GPU's memory is exhausted: lower the batch size, or find what else uses that GPU",
        r"\b(cuda|hip|xpu|mps)( backend)? out of memory",
        r"\btorch\.(cuda\.)?outofmemoryerror",
        r"cublas_status_alloc_failed",
        r"cuda error: out of memory",
    ),
    _rule(
        "host-out-of-memory",
        Action.RESTART,
        Confidence.MEDIUM,
        "the node's memory is exhausted",
        r"defaultcpuallocator: (can't|not enough) (allocate )?memory",
        r"\[errno 12\] cannot allocate memory",
        r"^(numpy[\w.]*\._array)?memoryerror\b",
        kernel=(r"out of memory: killed process", r"\boom-kill:"),
    ),
    _rule(
        "data-worker-killed",
        Action.RESTART,
        Confidence.MEDIUM,
        "a process of a data loader has ended: killed, from outside or because memory was "
        "exhausted, or by an error of its own, which the output of its node has before this one",
        r"dataloader worker \(pid.*\) (is killed by signal|exited unexpectedly)",
    ),
    # -- the script's data, seen by the GPU ----------------------------------------------------
    _rule(
        "device-assert",
        Action.STOP,
        Confidence.MEDIUM,
        "an assertion failed on the GPU, most often an index or a label out of range; the same "
        "samples fail again",
        r"device-side assert triggered",
        r"assertion .*(srcindex|t >= 0 && t < n_classes|index out of bounds).* failed",
    ),
    _rule(
        "gpu-error",
        Action.RESTART,
        Confidence.MEDIUM,
        "a kernel failed on the GPU: its process can no longer use the GPU, a new one can",
        r"an illegal memory access was encountered",
        r"unspecified launch failure",
        r"cuda error: misaligned address",
        r"cudnn_status_execution_failed",
        r"cublas_status_execution_failed",
        r"\bxid \([^)]*\): *(13|31|43|45)\b",
        kernel=(r"\bxid \([^)]*\): *(13|31|43)\b",),  # 45 also follows the kill of a process
    ),
    _rule(
        "nccl-usage",
        Action.STOP,
        Confidence.MEDIUM,
        "NCCL rejects how the script uses it, most often because two ranks use one GPU",
        r"ncclinvalid(usage|argument)",
        r"duplicate gpu detected",
    ),
    # -- the fabric ----------------------------------------------------------------------------
    _rule(
        "fabric-resources",
        Action.EXCLUDE_NODE,
        Confidence.MEDIUM,
        "this node cannot use its network devices: check its locked-memory limit and interfaces",
        r"call to ibv_(create_qp|create_cq|reg_mr|alloc_pd|modify_qp).* failed",
        r"bootstrap *: no socket interface found",
        r"unable to find address for: ",
        is_local=True,
    ),
    _rule(
        "fabric",
        Action.RESTART,
        Confidence.MEDIUM,
        "a connection of the fabric failed, or its peer is gone",
        r"got completion (from peer|with error)",
        r"ibv_wc_retry_exc_err|transport retry counter exceeded",
        is_consequence=True,
    ),
    _rule(
        GROUP_NOT_BUILT,
        Action.RESTART,
        Confidence.MEDIUM,
        "a process group could not be built: a rank was missing, or not reachable",
        r"client socket has timed out after",
        r"timed out after \d+ seconds waiting for clients",
        r"connectfullmesh failed",
        r"\bgroupbuildfailed: ",
        is_consequence=True,
    ),
    _rule(
        COLLECTIVE_TIMEOUT,
        Action.RESTART,
        Confidence.MEDIUM,
        "a collective timed out: another rank was missing from it",
        r"watchdog caught collective operation timeout",
        r"ran for \d+ milliseconds before timing out",
        r"timed out waiting \d+ms for (recv|send) operation",
        r"some nccl operations have failed or timed out",
        is_consequence=True,
    ),
    _rule(
        "lost-peer",
        Action.RESTART,
        Confidence.HIGH,
        "a peer of its process group is gone",
        r"ncclremoteerror|remote process exited",
        r"connection (was )?(closed|reset|refused|aborted)",
        r"(closed|reset) by (remote )?peer",
        r"connection(reset|refused|aborted)error",
        r"socket timeout|broken pipe",
        r"ncclsystemerror|ncclinternalerror|unhandled (system|cuda) error",
        r"dist(backend|network|store)error",
        r"gloo/transport",
        is_consequence=True,
    ),
    # -- access --------------------------------------------------------------------------------
    _rule(
        "access",
        Action.STOP,
        Confidence.HIGH,
        "access was denied: a token, a permission or a licence is missing",
        r"\b40[13] client error",
        r"gatedrepoerror|repositorynotfounderror",
        r"invalidaccesskeyid|signaturedoesnotmatch|\(accessdenied\)|expiredtoken",
    ),
    _rule(
        "service",
        Action.RESTART,
        Confidence.HIGH,
        "a service that the script uses did not answer",
        r"temporary failure in name resolution|name or service not known",
        r"read timed out|connecttimeout|readtimeout|max retries exceeded",
        r"\b(429|50[0-4]) (client|server) error",
        r"\((slowdown|serviceunavailable|internalerror)\)",
        r"\[errno 11[0-3]\]",
        r"timeouterror: \[errno 110\]",
        # Exceptions of its client, by their type: HTTP libraries, databases, stores.
        r"^(?!torch\.|subprocess\.)\w+(\.\w+)*\.\w*(connect|timeout|timedout)\w*(:|$)",
    ),
    # -- the script ----------------------------------------------------------------------------
    _rule(
        "script-cannot-run",
        Action.STOP,
        Confidence.HIGH,
        "the script cannot run",
        r"^(\[rank\d+\]:? *)?(syntax|indentation|tab|name|unboundlocal)error\b",
        r"error: (unrecognized arguments|the following arguments are required)",
        r"error: argument .*: invalid",
        r"can't open file '.*': \[errno 2\]",
    ),
    _rule(
        "missing-software",
        Action.STOP,
        Confidence.HIGH,
        "a module or a library is missing",
        r"^(\[rank\d+\]:? *)?(modulenotfounderror|importerror)\b",
        r"distributed package doesn't have \w+ built in",
        r"cannot open shared object file",
        r"version `(glibc|glibcxx|cxxabi)_[\d.]+' not found",
        r"undefined symbol: ",
        is_local=True,
    ),
    _rule(
        "missing-input",
        Action.STOP,
        Confidence.MEDIUM,
        "a file is missing, or not readable",
        r"^(\[rank\d+\]:? *)?(filenotfounderror|notadirectoryerror|permissionerror)\b",
        is_local=True,
    ),
    _rule(
        "wrong-model",
        Action.STOP,
        Confidence.HIGH,
        "the checkpoint belongs to another model",
        r"error\(s\) in loading state_dict for",
        r"size mismatch for .*: copying a param with shape",
    ),
    _rule(
        "wrong-shapes",
        Action.STOP,
        Confidence.MEDIUM,
        "shapes, types or devices of tensors do not match",
        r"mat1 and mat2 shapes cannot be multiplied",
        r"expected all tensors to be on the same device",
        r"expected scalar type \w+ but found",
        r"(input|output) channels?, but got",
    ),
    _rule(
        "fixed-number-of-nodes",
        Action.STOP,
        Confidence.HIGH,
        "Lightning refuses a world of another size than num_nodes, and the job would fail again in "
        "each such world: use ElasticStrategy (docs/how-to/lightning.md), or compute num_nodes "
        "from WORLD_SIZE",
        # TorchElasticEnvironment.validate_settings
        r"valueerror: .*num_nodes=\d+` in lightning, but .* does not match the world size",
    ),
    # -- the rest of the fabric ----------------------------------------------------------------
    _rule(
        "transport",
        Action.RESTART,
        Confidence.LOW,
        "a connection between ranks failed or timed out",
        # Of words as common as these, two are needed.
        rf"{_LATE}.*{_FABRIC}|{_FABRIC}.*{_LATE}",
        r"network is unreachable|no route to host",
        is_consequence=True,
    ),
)


# ----------------------------------------------------------------------------
# The verdict on one failure, with its evidence: a pure function of a worker's error.
#
# Most failures are transient, or the consequence of another node's: the world restarts, and the
# failure budget limits how often. Two kinds do not justify a restart. Some errors belong to a
# machine (a GPU with uncorrectable memory errors, a file system that has become read-only):
# another attempt on that node fails again, so it is quarantined. Others belong to the script or
# its input (a syntax error, an invalid flag): every attempt on any node fails again, so the job
# stops with that error.

_EVIDENCE = 200  # characters of the line that a rule matched
_REFUSAL = 1000  # characters of a message of this library with its hint
_WRONG_USAGE = 2  # argparse's exit code
HANG = "hang: "  # begins an agent's sentence about a worker that it has ended for a hang
# Sentences of this library about a worker's end. They name no cause that a rule could find.
_OURS = re.compile(
    rf"{HANG}|the script called sys\.exit\("
    r"|local rank \d+ \(pid \d+\) (was ended|ended|disappeared)"
)
# The types of Python's that C++ code, the operating system and the import system raise. Messages of
# all other types of Python's quote values (a KeyError consists of one): they match no words that do
# not follow the type.
_GROUPS = tuple(filter(None, [getattr(builtins, "BaseExceptionGroup", None)]))  # Python 3.11
_OF_THE_SYSTEM = (OSError, ImportError, MemoryError, *_GROUPS)
_OF_ANYTHING = (RuntimeError, SystemError, Exception, BaseException)
# Those that a broken connection between ranks may raise. Errors of other libraries, which are named
# with their module, are about other connections.
_OF_A_CONNECTION = (ConnectionError, TimeoutError, *_GROUPS)
# Those that faults of the code raise. (Input, output and other ranks raise others.)
_OF_CODE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)
_QUOTED = re.compile(r"(?<!\w)(['\"])[^'\"\n]*\1(?!\w)")  # names, paths and values
_OOM_KILL = re.compile(r"(?:killed process |\boom-kill:.*\bpid=)(\d+)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class FailureFacts:
    """The facts about a failed worker.

    ``text`` is its error, or the end of its log. ``exit_code`` is negative for a signal, as in
    Python's subprocess module. ``is_oom_kill``: the kernel killed a process of its cgroup for lack
    of memory at that time. ``works_elsewhere``: workers of this job have trained on another node,
    so a missing resource is not missing everywhere; False if all of them fail like this one.
    ``fails_everywhere``: every node of the world has failed in this way, a lone one twice, and the
    job has never made a step.
    ``kernel_log``: lines since the workers of its node were started.
    """

    text: str | None = None
    exit_code: int | None = None
    is_oom_kill: bool = False
    works_elsewhere: bool = False
    fails_everywhere: bool = False
    kernel_log: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FailureVerdict:
    """``reason`` is a sentence for users, ``evidence`` the matching line or code."""

    action: Action
    rule: str
    confidence: Confidence
    reason: str
    evidence: str

    def __str__(self) -> str:
        if self.rule == REFUSED:  # its last line is the hint
            return f"{self.reason}: {self.evidence}"
        return f"{self.reason} ({self.evidence})" if self.evidence else self.reason


def judge_failure(facts: FailureFacts) -> FailureVerdict:
    """The verdict on a failed worker. Equal facts give equal verdicts.

    The first matching rule of :data:`~elastic.membership.failures.RULES` applies, and within it
    the last matching line of the text: the last line of a traceback is the exception itself.
    """
    if facts.is_oom_kill:
        return _verdict(
            Action.RESTART,
            "host-out-of-memory",
            Confidence.HIGH,
            "the kernel killed it, or a process of its data loader, because its memory limit was "
            "reached; raise the limit, or lower the number of data workers",
            _exit_evidence(facts),
        )
    text = facts.text or ""
    if text.startswith(HANG):
        return _verdict(
            Action.RESTART,
            "hang",
            Confidence.MEDIUM,
            "it made no progress, and was ended",
            text.removeprefix(HANG)[:_EVIDENCE],
        )
    matched = _first_match(text)
    if (verdict_of_log := _in_kernel_log(facts, matched)) is not None:
        rule, line = verdict_of_log
        return _by_rule(rule, facts, f"kernel log: {line}"[:_EVIDENCE])
    if facts.fails_everywhere and is_of_code(text) and not _is_certain(matched):
        return _verdict(
            Action.STOP,
            "fails-everywhere",
            Confidence.HIGH,
            "every node raised this error before the first step of the job",
            for_a_line(text)[:_EVIDENCE],
        )
    if matched is not None:
        rule, line = matched
        # The hint of a refusal states what to do.
        evidence = exception_of(text)[:_REFUSAL] if rule.name == REFUSED else line[:_EVIDENCE]
        return _by_rule(rule, facts, evidence)
    return _by_exit_code(facts)


def is_of_code(text: str | None) -> bool:
    """Whether a worker's error is one of Python's that a fault of the code raises.

    >>> is_of_code("AttributeError: module 'torch.nn' has no attribute 'Linaer'")
    True
    >>> is_of_code("json.decoder.JSONDecodeError: Expecting value"), is_of_code("OSError: busy")
    (False, False)
    """
    kind = getattr(builtins, exception_name(text or ""), None)
    return isinstance(kind, type) and issubclass(kind, _OF_CODE)


def _is_certain(matched: tuple[Rule, str] | None) -> bool:
    return matched is not None and matched[0].confidence is Confidence.HIGH


def _in_kernel_log(
    facts: FailureFacts, matched: tuple[Rule, str] | None
) -> tuple[Rule, str] | None:
    """The cause according to the kernel, if the worker's own text does not contain it.

    An error of the script remains one, whatever else has happened on its machine. A definite fault
    of the machine explains any other failure; one that may not have affected this process explains
    only an otherwise unexplained failure. An event about one process (an OOM kill, a fault of the
    script's kernels on a GPU) explains only the failure of a process without its own error text.
    """
    by_text = matched[0] if matched is not None else None
    is_script_error = by_text is not None and by_text.action is Action.STOP
    if not facts.kernel_log or is_script_error or _is_wrong_usage(facts):
        return None
    is_unexplained = by_text is None or by_text.is_consequence
    for rule in RULES:
        if rule is by_text:
            return None  # the worker's text states the same cause
        for line in reversed(facts.kernel_log):
            if not rule.kernel_pattern.search(line) or _is_about_another(line, facts):
                continue
            is_machine = rule.action is Action.EXCLUDE_NODE
            if is_machine and (is_unexplained or rule.confidence is Confidence.HIGH):
                return rule, line
            if not is_machine and is_unexplained and not _has_own_error(facts):
                return rule, line
    return None


def _is_about_another(line: str, facts: FailureFacts) -> bool:
    """Whether a line reports an OOM kill of a process that the worker's text does not name: that of
    another job on the machine. (In a container, the log has other process ids. There, the count of
    the cgroup is evidence.)"""
    killed = _OOM_KILL.search(line)
    return killed is not None and f"(pid {killed[1]})" not in (facts.text or "")


def _has_own_error(facts: FailureFacts) -> bool:
    """Whether the process ended on its own: with an error that is not a peer's."""
    is_signal = facts.exit_code is not None and facts.exit_code < 0
    has_text = bool(facts.text) and not _is_ours(facts.text)
    return not is_signal and has_text and not is_consequence(facts.text)


def _is_wrong_usage(facts: FailureFacts) -> bool:
    has_text = bool((facts.text or "").strip()) and not _is_ours(facts.text)
    return facts.exit_code == _WRONG_USAGE and not has_text


def _is_ours(text: str | None) -> bool:
    return _OURS.match(exception_of(text or "")) is not None


def is_consequence(text: str | None, kernel_log: tuple[str, ...] = ()) -> bool:
    """Whether a worker's error only states that a peer is gone or does not respond, and the
    kernel's log of its node shows no fault of the machine.

    Decided by the same rule as its verdict.

    >>> is_consequence("RuntimeError: Connection closed by peer [127.0.0.1]:4711")
    True
    >>> is_consequence("ImportError: libnccl.so.2: cannot open shared object file")
    False
    """
    matched = _first_match(text or "")
    if matched is None or not matched[0].is_consequence:
        return False
    in_log = _in_kernel_log(FailureFacts(text=text, kernel_log=kernel_log), matched)
    return in_log is None or in_log[0].action is not Action.EXCLUDE_NODE


def rule_of(text: str | None) -> str:
    """The name of the rule that applies to a worker's error; "" if none does.

    >>> rule_of("DistStoreError: Timed out after 601 seconds waiting for clients. 3/4 clients")
    'group-not-built'
    """
    matched = _first_match(text or "")
    return matched[0].name if matched is not None else ""


# Evaluated again in every iteration of a waiting leader.
@functools.lru_cache(maxsize=128)
def _first_match(text: str) -> tuple[Rule, str] | None:
    if _is_ours(text):
        return None
    lines = [line.strip() for line in exception_of(text).splitlines() if line.strip()]
    name = exception_name(text)
    builtin = getattr(builtins, name, None)  # `open`, for a text such as "open: no such file"
    is_error = isinstance(builtin, type) and issubclass(builtin, BaseException)
    kind = builtin if is_error else None
    pairs = [(_QUOTED.sub("''", line), line) for line in lines]
    is_quote, may_be_a_peer = _quotes_values(kind), _may_be_a_peer(name, kind)
    for rule in RULES:
        if rule.is_consequence and not may_be_a_peer:
            continue
        matches = rule.pattern.match if is_quote else rule.pattern.search
        for words, line in pairs[:1] if is_quote else reversed(pairs):
            if matches(words):
                return rule, line
    return None


def _quotes_values(kind: type[BaseException] | None) -> bool:
    return kind is not None and not (issubclass(kind, _OF_THE_SYSTEM) or kind in _OF_ANYTHING)


def _may_be_a_peer(name: str, kind: type[BaseException] | None) -> bool:
    """Whether an exception with this name, or a text without one, may be due to another rank."""
    if kind is not None:
        return issubclass(kind, _OF_A_CONNECTION) or kind in (*_OF_ANYTHING, OSError)
    return "." not in name or name.startswith(("torch.", "elastic."))


def _by_rule(rule: Rule, facts: FailureFacts, line: str) -> FailureVerdict:
    action, reason = rule.action, rule.reason
    if rule.restarts_if_others_work and facts.works_elsewhere:
        action = Action.RESTART
    elif rule.is_local and action is Action.STOP and facts.works_elsewhere:
        # The same script runs on other nodes: this one differs from them.
        action = Action.EXCLUDE_NODE
        reason = f"{reason}, but not on other nodes of this job"
    elif rule.is_local and action is Action.EXCLUDE_NODE and not facts.works_elsewhere:
        # No node has worked so far: excluding one after the other would hide a common cause.
        action = Action.RESTART
    return _verdict(action, rule.name, rule.confidence, reason, line)


def _by_exit_code(facts: FailureFacts) -> FailureVerdict:
    code = facts.exit_code
    evidence = _exit_evidence(facts)
    if _is_wrong_usage(facts):
        return _verdict(
            Action.STOP,
            "wrong-usage",
            Confidence.MEDIUM,
            "the script rejected its arguments",
            evidence,
        )
    if code == -signal.SIGILL and facts.works_elsewhere:
        return _verdict(
            Action.EXCLUDE_NODE,
            "illegal-instruction",
            Confidence.MEDIUM,
            "its processor lacks an instruction that the binaries use, or is faulty",
            evidence,
        )
    if code == -signal.SIGABRT:
        # gloo/transport/tcp/pair.cc: the message is larger than the one expected.
        return _verdict(
            Action.RESTART,
            "abort",
            Confidence.MEDIUM,
            "an assertion in C++ failed, whose text is on its stderr; on gloo also a collective "
            "that other ranks call with another size, or not at all",
            evidence,
        )
    if code == -signal.SIGBUS:
        return _verdict(
            Action.RESTART,
            "bus-error",
            Confidence.MEDIUM,
            "shared memory (/dev/shm) is full, or a mapped file was truncated",
            evidence,
        )
    if code is not None and code < 0:
        return _verdict(Action.RESTART, "signal", Confidence.MEDIUM, "a signal ended it", evidence)
    if facts.text and not _is_ours(facts.text):
        evidence = exception_line(facts.text)[:_EVIDENCE]
    return _verdict(
        Action.RESTART, UNKNOWN, Confidence.LOW, "no rule matches; it may be transient", evidence
    )


def _exit_evidence(facts: FailureFacts) -> str:
    code = facts.exit_code
    if code is None:
        return ""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _verdict(
    action: Action, rule: str, confidence: Confidence, reason: str, evidence: str
) -> FailureVerdict:
    return FailureVerdict(
        action=action, rule=rule, confidence=confidence, reason=reason, evidence=evidence
    )
