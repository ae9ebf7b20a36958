"""``make cluster-demo``: a run on a simulated cluster that is scaled and loses a node.

The cluster is a head and two nodes for rollout actors, each simulated by processes on this machine.
A job submitted with `sol-rl submit` is scaled 1 -> 3 -> 2 with `sol-rl scale` while it runs, and
one of the two nodes is removed. Then the same configuration runs again undisturbed, and both runs
are compared byte by byte. All commands are the ones that a user of a cluster would type.
"""
