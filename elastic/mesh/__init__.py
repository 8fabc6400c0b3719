"""Replicas of several ranks: their own group, and the groups of a world around them.

:class:`ModelReplica` is this process's replica: torch's default group, and the DeviceMesh of
``run.mesh``, created once in the lifetime of the process (docs/decisions/0030). Its ranks run the
same collectives in the same order, so they must leave a step together: ``any`` and ``whole`` ensure
that. :class:`ReplicaProcessGroup` owns the groups that change with the world: all ranks, and the
ranks at this position of each replica, which reduce gradients and exchange state.

Start reading in ``replica``. May import process_group and the packages below it.
"""

from elastic.mesh.group import ReplicaProcessGroup, process_group
from elastic.mesh.replica import ModelReplica, ReplicaMeeting, mesh_of

__all__ = ["ModelReplica", "ReplicaMeeting", "ReplicaProcessGroup", "mesh_of", "process_group"]
