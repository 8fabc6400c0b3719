"""A process group that can be aborted: built for one world, taken down with it, never waited for.

What other packages may use is listed here, and nothing else
(``tests/unit/test_process_group_face.py``). :class:`ProcessGroup` is the component: ``build`` or
``form``, ``settle``, ``abort``, ``destroy``. The collectives act on its group, as those of
torch.distributed act on the default group. :class:`ReleasableGroup` is for DDP's reducer;
:func:`pending_works` is for code that waits for gradients.

Start reading in ``group``. ``pending`` has the collectives that are under way; ``patches`` every
change that is made to torch, and how it is undone; ``reducer`` what DDP's reducer is given.
``sockets`` finds and shuts down a group's connections (gloo), ``communicators`` opens and aborts
NCCL's, within a ``deadline``; ``nccl_environment`` keeps torch's own error handling out of that.
``semantics`` defines what the end of a collective means on each backend, and ``collectives`` are
those for small JSON values and for tensors. ``wait_phase`` writes waits for other ranks to the page
that the agent judges hangs by.

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
from elastic.process_group.device import choose_device
from elastic.process_group.group import (
    DEFAULT_BACKENDS,
    GroupSpec,
    ProcessGroup,
)
from elastic.process_group.nccl_environment import leave_errors_to_us
from elastic.process_group.patches import TorchExceptHook, remove_reducer_hooks
from elastic.process_group.pending import PendingWorks, leak, pending_works
from elastic.process_group.reducer import ReleasableGroup
from elastic.process_group.semantics import (
    Semantics,
    backend_of,
    register_semantics,
    semantics_of,
)
from elastic.process_group.wait_phase import describe_group, queued

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
    "register_semantics",
    "remove_reducer_hooks",
    "semantics_of",
    "use_as_world",
    "world_group",
]
