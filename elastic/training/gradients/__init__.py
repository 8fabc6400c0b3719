"""From local gradients to one step of the job.

``wrap`` is the DistributedDataParallel that survives its world, ``reduction`` weights uneven
shares, ``control_flags`` are piggybacked on the first bucket, ``accumulation`` holds the steps
whose gradients are not used yet.

May import ``step`` and the process group; none of the other packages of training.
"""
