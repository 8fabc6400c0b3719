"""From local gradients to one step of the job.

Start with ``wrap``, the DistributedDataParallel that outlives its world; ``reduction`` weights
uneven shares, ``control_flags`` are piggybacked on the first bucket, ``stages`` sums the gradients
of pipelines, ``accumulation`` tracks steps whose gradients have not been used yet.

May import ``step`` and the process group, and no other package of training.
"""
