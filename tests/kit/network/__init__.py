"""An emulated network for tests: each node in a network namespace, every packet through a switch.

- :mod:`kit.network.emulated`: creates the namespaces and injects faults
- :mod:`kit.network.switch`: the process that forwards, delays or drops packets
- :mod:`kit.network.packets`: the packet fields that the switch reads

The switch is a program instead of ``tc netem`` and ``nft``, because many kernels of containers and
micro VMs have neither. Start with ``emulated``. Needs root, ``ip`` of iproute2 and
``/dev/net/tun``; Linux only. May import the standard library and the clock.
"""
