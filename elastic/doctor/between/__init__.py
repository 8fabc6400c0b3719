"""TCP between nodes: whether every port answers (``pairs``), and how fast each path is
(``bandwidth``).

Start with ``pairs``. Both listen briefly and return findings of :mod:`elastic.doctor.findings`.
Neither imports torch.
"""
