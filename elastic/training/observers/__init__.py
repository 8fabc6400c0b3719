"""Passive observers of training: metrics, progress, profiles, and the time account.

``step_observers`` notifies them of steps and worlds. Values logged with ``run.log(loss=…)`` go
from the step to TensorBoard, trackers and the journal: start with ``metrics_log``, which decides
what is written when, by which rank. ``values`` validates them, ``history`` keeps them by step,
``device_reads`` reads tensors on a device without waiting for it, ``writer`` is the interface of a
destination, ``writer_thread`` calls it, ``tensorboard`` implements it, and ``defaults`` chooses.
``progress_line`` prints progress; ``profiling`` writes traces.

May import ``step_account``, a worker's world, telemetry and tuning.
"""
