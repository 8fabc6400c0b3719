"""Distributes data over a changing world: samplers, loaders, and their random numbers.

Start with ``plan``. ``permutation``, ``draws`` and ``plan`` are arithmetic without I/O; ``sampler``
and ``loader`` apply it to torch's DataLoader (``source``). ``following`` reads one loader within
the steps of another, and ``data_workers`` keeps the loader's processes across worlds.

May import ``step`` and no other package of training.
"""
