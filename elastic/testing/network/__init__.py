"""An emulated network for tests: each node in a network namespace, every packet through a switch.

- :mod:`elastic.testing.network.emulated`: makes the namespaces, and orders what goes wrong
- :mod:`elastic.testing.network.switch`: the process that forwards packets, late or not at all
- :mod:`elastic.testing.network.packets`: what the switch reads of a packet

The switch is a program, and not ``tc netem`` and ``nft``: many kernels of containers and micro VMs
have neither, and there is no other way to hold packets back. Needs root, ``ip`` of iproute2 and
``/dev/net/tun``; Linux only. May import the standard library and the clock.
"""
