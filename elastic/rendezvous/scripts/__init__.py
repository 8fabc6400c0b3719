"""Warnings for scripts that know nothing of this project.

``starting_over``: one that overwrites the checkpoint it should have loaded (``file_reads`` tells
whether it was read); ``restart_notice``: one whose workers were started again. May import what
:mod:`elastic.rendezvous` may; nothing of that package.
"""
