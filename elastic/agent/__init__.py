"""A node's agent: its workers, its part in the job's membership, and the leader's duties.

Start reading in ``service``; ``leader`` is what the leader does in addition, ``workers`` how
processes are started and watched.
"""
