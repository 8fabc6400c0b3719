"""Runs every operation of torch.distributed between processes and checks the results.

Start with ``session``. ``operations`` is the program of one rank; only it imports torch; ``speed``
is its part that measures. ``ranks`` starts this node's ranks and ends them at a deadline.
``outcomes`` determines, from the reports of all ranks, which operations work, and otherwise which
rank is at fault. ``mpi`` runs the same program under mpirun.
"""
