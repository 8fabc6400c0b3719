"""TCP between nodes: whether every port answers (``pairs``), and how fast each way is
(``bandwidth``).

Start with ``pairs``. Both listen for a moment, and give findings of :mod:`elastic.doctor.findings`.
"""
