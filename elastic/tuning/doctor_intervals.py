"""The fixed intervals and thresholds of ``elastic doctor``'s checks, each with its reason.

They do not affect jobs: they limit an examination, and separate good measurements from bad ones.
docs/timeouts.md is generated from this file, too (scripts/timeouts_table.py).
"""

from __future__ import annotations

# Elastic doctor: limits of one check -----------------------------------------------------------

# One collective, or one probe of the machine, may be silent this long (--deadline). The slowest
# one, the first NCCL collective of a process, takes several seconds.
DOCTOR_DEADLINE_S = 20.0
# How long the nodes wait for each other (--join-timeout): a script or a person starts them.
DOCTOR_JOIN_S = 60.0
# Rank processes start: the import of torch on a busy machine.
DOCTOR_START_S = 120.0
# After one rank has failed the others cannot succeed; they may still report their operation.
DOCTOR_OTHER_RANKS_S = 2.0
# A rank process that has closed its output ends, or is killed.
DOCTOR_END_S = 2.0
# The ranks of one node may finish at once while those of another wait for their deadline.
DOCTOR_EXCHANGE_MARGIN_S = 15.0
# A result that has arrived is used even at its deadline: the shortest wait for one.
DOCTOR_MIN_WAIT_S = 0.01
# How long a probe's process is waited for after its SIGKILL: one in a hung system call never ends.
DOCTOR_KILLED_S = 0.2
# The servers of the checks between nodes check this often whether to end.
DOCTOR_SERVER_TURN_S = 0.05
# Polling interval for the output of ranks that mpirun has started.
DOCTOR_MPI_POLL_S = 0.1
# A message size whose round trip takes longer ends the series of measurements.
DOCTOR_SLOW_ROUND_TRIP_S = 2.0
# The raw TCP stream between two ranks, for the comparison with torch: both are about to connect.
DOCTOR_RAW_CONNECT_S = 10.0
# A TCP connection to a port of another node: three SYN packets (at 0, 1 and 3 s) on a lossy
# network.
DOCTOR_PAIR_CONNECT_S = 3.0
# Data is sent to each address of another node for this long: enough for TCP to reach its speed.
DOCTOR_BANDWIDTH_S = 0.3
# First contact with etcd. One call of an agent has the same limit (STORE_CALL_S).
DOCTOR_ETCD_CONNECT_S = 5.0
# One call to etcd, and the first event of a watch.
DOCTOR_ETCD_CALL_S = 5.0
# The lease of the keys that the checks write: they are removed even if this process is killed.
DOCTOR_LEASE_S = 10.0
# The probes of the preflight, which an agent runs before it joins, while it starts.
PREFLIGHT_PROBES_S = 10.0
# A connection of the preflight to a port of the leader: one repeated SYN.
PREFLIGHT_CONNECT_S = 1.5

# Elastic doctor: thresholds --------------------------------------------------------------------

# Above this median, etcd's disk or network is slow: etcd recommends 10 ms for an fsync.
SLOW_ETCD_MS = 100.0
# Above this median, renewals of a lease of 4 s, due every third of it, are late.
TOO_SLOW_ETCD_MS = 1000.0
# A certificate that expires sooner is reported: two weeks are enough to issue another one.
CERTIFICATE_WARNING_S = 14 * 86400.0
# A slower fsync of a small file in the checkpoint folder delays every commit.
SLOW_FSYNC_MS = 500.0
# Larger clock differences make logs of several nodes hard to read, and certificates invalid.
CLOCK_SKEW_WARNING_S = 1.0
