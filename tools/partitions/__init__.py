"""``make partitions``: training runs on isolated nodes while the network between them fails.

The nodes of a Ray cluster run in network namespaces of this machine, connected by a link that can
add delay, drop packets or be cut (``tests.cluster.network``). Each scenario is a tiny run whose
results are compared bit by bit with an undisturbed run. The exit code is 1 if any run ended
differently. Needs root on Linux.
"""
