"""``elastic run``: torchrun with our defaults, in this process or as several local nodes.

Start with ``run``. ``flags`` and ``torchrun_parser`` parse without importing torch; ``local_nodes``
starts and ends the agents of ``--nodes-local`` (``local_agent``), each bound to its parent
(``bound_to_parent``).
"""
