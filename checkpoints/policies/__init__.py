"""When to save (:mod:`~checkpoints.policies.save`) and which checkpoints to retain
(:mod:`~checkpoints.policies.retention`): small callables that compose with ``|``.

Pure decisions: they read no clock and no storage. May import: :mod:`checkpoints.format`,
:mod:`checkpoints.errors`. Start reading at :mod:`checkpoints.policies.save`.
"""
