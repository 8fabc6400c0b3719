"""Saving: one rank writes its share, synchronously or on a background thread.

May import: :mod:`checkpoints.catalog` and everything below it; neither
:mod:`checkpoints.loading` nor :mod:`checkpoints.memory`. Start reading at
:mod:`checkpoints.saving.save`, then :mod:`checkpoints.saving.engine`;
:mod:`checkpoints.saving.supervised` replaces an engine whose thread has died.
"""
