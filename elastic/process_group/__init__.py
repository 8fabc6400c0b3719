"""A process group that can be aborted: built for one world, never blocked by a dead peer.

Other packages may use only the names exported here (``tests/unit/test_process_group_face.py``).
:class:`ProcessGroup` is the component: ``build`` or ``form``, ``settle``, ``abort``, ``destroy``.
The collectives use its group, as torch.distributed's collectives use the default group.
:class:`ReleasableGroup` is for DDP's reducer; :func:`pending_works` is for code that waits for
gradients.

Start reading in ``group``. ``pending`` tracks the collectives in flight; ``patches`` lists every
change to torch, and how it is undone; ``reducer`` defines the process group of DDP's reducer.
``sockets`` finds and shuts down a group's connections (gloo). ``communicators`` opens and aborts
NCCL's communicators, within a ``deadline``; ``nccl_environment`` disables torch's error handling.
``semantics`` defines what the end of a collective means on each backend. ``collectives`` transfers
small JSON values and tensors. ``stale_groups`` finds groups that a script keeps beyond their world.
``wait_phase`` records waits for other ranks on the page from which the agent detects hangs.

May import world, link (for sockets in forked children), hangs, tuning and telemetry.
"""

from elastic.process_group.collectives import (
    OwnGroup,
    RankGroup,
    all_gather_json,
    all_sum,
    broadcast_bytes,
    broadcast_json,
    broadcast_tensors,
    complete,
    control_device,
    peer_group,
    use_as_world,
    world_group,
)
from elastic.process_group.communicators import open_communicator
from elastic.process_group.deadline import leak
from elastic.process_group.device import choose_device
from elastic.process_group.group import (
    DEFAULT_BACKENDS,
    GroupSpec,
    ProcessGroup,
)
from elastic.process_group.nccl_environment import leave_errors_to_us
from elastic.process_group.patches import TorchExceptHook, remove_reducer_hooks
from elastic.process_group.pending import PendingWorks, pending_works
from elastic.process_group.reducer import ReleasableGroup
from elastic.process_group.semantics import (
    Semantics,
    backend_of,
    register_semantics,
    semantics_of,
)
from elastic.process_group.stale_groups import refuse_stale_group, uses_stale_group
from elastic.process_group.wait_phase import (
    call_in_long_waits,
    describe_group,
    queued,
    waits_for_ranks,
)

__all__ = [
    "DEFAULT_BACKENDS",
    "GroupSpec",
    "OwnGroup",
    "PendingWorks",
    "ProcessGroup",
    "RankGroup",
    "ReleasableGroup",
    "Semantics",
    "TorchExceptHook",
    "all_gather_json",
    "all_sum",
    "backend_of",
    "broadcast_bytes",
    "broadcast_json",
    "broadcast_tensors",
    "call_in_long_waits",
    "choose_device",
    "complete",
    "control_device",
    "describe_group",
    "leak",
    "leave_errors_to_us",
    "open_communicator",
    "peer_group",
    "pending_works",
    "queued",
    "refuse_stale_group",
    "register_semantics",
    "remove_reducer_hooks",
    "semantics_of",
    "use_as_world",
    "uses_stale_group",
    "waits_for_ranks",
    "world_group",
]
