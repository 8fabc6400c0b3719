"""What of a job must survive, and what an interrupted step is rolled back to.

``job_state`` holds models, optimizers and everything else that was registered; ``snapshot``,
``copies`` and ``change_watch`` keep what a step may change; ``rollback`` undoes it.
"""
