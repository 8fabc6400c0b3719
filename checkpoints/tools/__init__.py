"""Operations on finished checkpoints: compare two of them, export to and import from other formats.

May import everything but :mod:`checkpoints.testing`. Start reading at
:mod:`checkpoints.tools.compare`.
"""
