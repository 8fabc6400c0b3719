"""Loading: find the latest valid checkpoint, verify every byte, copy it into live tensors.

May import: :mod:`checkpoints.catalog` and everything below it; neither
:mod:`checkpoints.saving` nor :mod:`checkpoints.memory`. Start reading at
:mod:`checkpoints.loading.load`, then :mod:`checkpoints.loading.resolve`.
"""
