"""`elastic doctor`: checks of machines, network, etcd and collectives."""
