"""Where checkpoints are stored: one protocol; local file systems and object stores behind it.

May import: :mod:`checkpoints.format` (names only), :mod:`checkpoints.errors`. Start reading at
:mod:`checkpoints.storage.protocol`.
"""
