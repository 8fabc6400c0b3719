"""The part of torchrun that this project provides: its rendezvous handler and agent.

Start reading in ``handler``.
"""
