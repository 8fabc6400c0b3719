"""The checkpoints in a storage: committing, listing, retention and garbage collection.

May import: :mod:`checkpoints.storage`, :mod:`checkpoints.policies`, :mod:`checkpoints.format`,
:mod:`checkpoints.errors`. Start reading at :mod:`checkpoints.catalog.commit`.
"""
