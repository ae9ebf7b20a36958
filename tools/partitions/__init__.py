"""``make partitions``: runs on machines that are really apart, while their network fails.

Nodes of a Ray cluster live in network namespaces of this machine, joined by a wire that delays,
loses and cuts (``tests.cluster.network``). Each scenario is a tiny run, compared bit by bit with an
undisturbed one. Exit code 1 when one ended otherwise. Needs root on Linux.
"""
