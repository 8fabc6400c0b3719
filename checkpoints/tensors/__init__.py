"""Tensors in a checkpoint: element types, regions, sharding, and which rank writes what.

Mostly arithmetic on shapes; :mod:`~checkpoints.tensors.dtensors` and
:mod:`~checkpoints.tensors.elements` read live tensors. No file, no storage, no communication.

May import: :mod:`checkpoints.errors`. Start reading at :mod:`checkpoints.tensors.regions`, then
:mod:`checkpoints.tensors.partition`.
"""
