"""The graceful ends of a node: a request to leave, parking after the job's end, the end itself.

``leaving`` handles SIGTERM depending on what torchrun's main thread is doing, ``parking`` keeps an
agent running whose launcher would restart it after any exit, ``job_end`` records the job's outcome.

May import what :mod:`elastic.agent` may, but nothing else of that package. Start with ``leaving``.
"""
