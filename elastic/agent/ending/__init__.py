"""The orderly ends of a node: told to leave, parked after the job's end, the job's end itself.

``leaving`` handles SIGTERM depending on what torchrun's main thread is doing, ``parking`` keeps an
agent whose launcher would restart whatever exits, ``job_end`` notes how the job has ended.

Imports what :mod:`elastic.agent` may, and nothing of it but this package. Start with ``leaving``.
"""
