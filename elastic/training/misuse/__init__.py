"""Detects scripts whose result would silently be wrong after a death, or on several ranks.

``early_leave`` finds ranks that leave the loop before the others (``ways_out``: how a loop was
left). ``weight_averages`` finds untracked averages among the objects that are ``reachable`` for the
training function, and ``untracked_buffers``, ``untracked_generators`` and ``step_counters`` other
state there. ``optimizer_states`` finds state that would not be restored as it was.
``module_structures`` finds parameters that are added or replaced, and ``source`` what is made anew
in each call of that function, such as loops that would count from 0 again. Each error or warning
names the lines to write instead. The checks cost nothing in later steps.
"""
