"""The report of a job, from its journals."""
