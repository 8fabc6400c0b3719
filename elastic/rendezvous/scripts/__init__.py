"""Warnings for scripts that do not use this project.

``starting_over`` warns about a script that overwrites the checkpoint that it should have loaded
(``file_reads`` detects whether it was read), ``restart_notice`` about one whose workers will be
restarted. Start with ``starting_over``. May import what :mod:`elastic.rendezvous` may, but nothing
of that package.
"""
