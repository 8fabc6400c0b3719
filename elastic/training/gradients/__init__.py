"""From local gradients to one step of the whole job.

``wrap`` is the DistributedDataParallel that survives its world, ``reduction`` weights uneven
shares, ``control_flags`` travel with the first bucket; ``optimizers`` watches steps,
``accumulation`` and ``replicas`` check them.
"""
