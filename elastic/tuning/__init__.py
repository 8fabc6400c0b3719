"""Options, intervals and the environment of workers."""
