"""Where checkpoints are stored: one protocol, implemented for file systems and object stores.

May import: :mod:`checkpoints.format` (names only), :mod:`checkpoints.errors`. Start reading at
:mod:`checkpoints.storage.protocol`.
"""
