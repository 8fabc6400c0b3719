"""Who watches training without taking part: metrics, progress, profiles, and the time account.

``step_observers`` tells them of steps and worlds. What a script logs (``run.log(loss=…)``) goes
from the step to TensorBoard, trackers and the journal: start with ``metrics_log``, which decides
what is written when, by which rank. ``values`` checks what was given, ``history`` keeps it by step,
``device_reads`` reads tensors of a device without waiting for it, ``writer`` is the interface of a
destination, ``writer_thread`` calls it, ``tensorboard`` implements it, and ``defaults`` chooses.
``progress_line`` tells people how far training is; ``profiling`` writes traces.

May import ``step_account``, a worker's world, telemetry and tuning.
"""
