"""Detects scripts whose result would silently be wrong after a death, or on several ranks.

``early_leave`` finds ranks that leave the loop before the others (``ways_out``: how a loop was
left), and ``counted_epochs`` loops that would count from 0 again. ``weight_averages`` finds
untracked averages among the objects that are ``reachable`` for the training function, and
``untracked_buffers``, ``untracked_generators`` and ``step_counters`` other state there.
``copied_weights`` and ``local_state`` find what is made anew in each call of that function, from
its source. Each error or warning names the lines to write instead. The checks cost nothing in
later steps.
"""
