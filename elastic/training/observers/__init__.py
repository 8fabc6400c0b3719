"""Passive observers of training: metrics, progress, profiles, and the time account.

``step_observers`` notifies them of steps and worlds. Values logged with ``run.log(loss=…)`` are
written to TensorBoard, trackers and the journal: start with ``metrics_log``, which decides which
rank writes them, and when. ``values`` validates values, ``history`` keeps them by step, and
``device_reads`` reads tensors on a device without waiting for it. ``writer`` is the interface of a
destination, ``writer_thread`` calls it, ``tensorboard`` implements it, and ``defaults`` chooses it.
``progress_line`` prints progress; ``profiling`` writes traces.

May import ``step_account``, a worker's world, telemetry and tuning.
"""
