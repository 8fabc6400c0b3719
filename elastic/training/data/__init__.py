"""Which samples each rank reads, whatever the world: samplers, loaders, and their random numbers.

``permutation``, ``draws`` and ``plan`` are arithmetic without I/O; ``sampler`` and ``loader`` apply
it to torch's DataLoader (``source``), ``data_workers`` keeps its processes across worlds.
"""
