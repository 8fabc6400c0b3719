"""The on-disk format: names, the state tree, the manifest, and the parser that trusts none of it.

Converts between bytes and frozen dataclasses; opens no files. ``manifest.schema.json`` describes
the manifest for other readers.

May import: :mod:`checkpoints.tensors`, :mod:`checkpoints.errors`. Start reading at
:mod:`checkpoints.format.names`, then :mod:`checkpoints.format.manifest`.
"""
