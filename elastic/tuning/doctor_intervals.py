"""The fixed intervals and thresholds of ``elastic doctor``'s checks, each with its reason.

No job waits for them: they bound an examination, and separate a good measurement from a bad one.
docs/timeouts.md is generated from this file, too (scripts/timeouts_table.py).
"""

from __future__ import annotations

# Elastic doctor: limits of one check -----------------------------------------------------------

# One collective may be silent this long, and one probe of the machine (--deadline). The slowest
# one, the first NCCL collective of a process, takes several seconds.
DOCTOR_DEADLINE_S = 20.0
# How long the nodes wait for each other (--join-timeout): they are started by a script or a person.
DOCTOR_JOIN_S = 60.0
# Rank processes start: torch's import on a machine that is busy.
DOCTOR_START_S = 120.0
# After one rank has failed the others cannot succeed; they may still report where they are.
DOCTOR_OTHER_RANKS_S = 2.0
# A rank process that has closed its output ends, or is killed.
DOCTOR_END_S = 2.0
# The ranks of one node may be done at once while another node's wait for their deadline.
DOCTOR_EXCHANGE_MARGIN_S = 15.0
# A result that has arrived is taken even at its deadline: the least wait for one.
DOCTOR_LEAST_WAIT_S = 0.01
# After its SIGKILL a probe's process is waited for this long: one in a hung system call never ends.
DOCTOR_KILLED_S = 0.2
# The servers of the checks between nodes look this often whether they are to end.
DOCTOR_SERVER_TURN_S = 0.05
# Between two looks at what ranks have written that mpirun has started.
DOCTOR_MPI_POLL_S = 0.1
# A message size whose round trip takes longer ends the series of speeds.
DOCTOR_SLOW_ROUND_TRIP_S = 2.0
# The raw TCP stream between two ranks, for the comparison with torch: both are on their way.
DOCTOR_RAW_CONNECT_S = 10.0
# A TCP connection to a port of another node: three tries of SYN (0, 1 and 3 s) on a lossy network.
DOCTOR_PAIR_CONNECT_S = 3.0
# Data is sent to each address of another node for so long: enough for TCP to reach its speed.
DOCTOR_BANDWIDTH_S = 0.3
# The first contact of etcd. One call of an agent has the same limit (STORE_CALL_S).
DOCTOR_ETCD_CONNECT_S = 5.0
# One call to etcd, and the first event of a watch.
DOCTOR_ETCD_CALL_S = 5.0
# The lease of the keys that the checks write: they are removed even if this process is killed.
DOCTOR_LEASE_S = 10.0
# The probes of the preflight, which an agent runs before it joins: it starts meanwhile.
PREFLIGHT_PROBES_S = 10.0
# A connection of the preflight to a port of the leader: one repeated SYN.
PREFLIGHT_CONNECT_S = 1.5

# Elastic doctor: thresholds --------------------------------------------------------------------

# Above this median, etcd's disk or network is slow: its own advice for an fsync is 10 ms.
SLOW_ETCD_MS = 100.0
# Above this median, renewals of a lease of 4 s, which are due in thirds of it, come too late.
TOO_SLOW_ETCD_MS = 1000.0
# A certificate that expires sooner is reported: two weeks are enough to issue another one.
CERTIFICATE_WARNING_S = 14 * 86400.0
# A slower fsync of a small file in the checkpoint folder delays every commit.
SLOW_FSYNC_MS = 500.0
# Clocks that differ by more make logs of several nodes hard to read, and certificates invalid.
CLOCK_SKEW_WARNING_S = 1.0
