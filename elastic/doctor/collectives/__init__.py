"""Every operation of torch.distributed between processes, with results checked.

``operations`` is the program of one rank, the only one that imports torch; ``speed`` is its part
that measures. ``ranks`` starts this node's ranks and ends them at a deadline. ``outcomes`` says,
from what all ranks reported, which operations work, and otherwise which rank is to blame. ``mpi``
has mpirun start the same program.
"""
