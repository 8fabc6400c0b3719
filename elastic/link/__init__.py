"""The connection between a worker and its agent, on one machine."""
