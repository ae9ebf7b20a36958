"""``make soak``: many small runs with random faults in each, compared with undisturbed runs.

Everything about run i of a seed is derived from the two numbers: its settings (the smallest
configuration, or that with ``explore_ahead``, with two learner replicas, or with both), its one or
two faults, and the target, kind and moment of each, among all moments of the undisturbed run with
the same settings. Half of the second faults occur during recovery from the first. OUT/faults.jsonl
has a row per run, so a soak that was stopped (exit code 130) can be continued. All runs share one
Ray instance, its processes, and one template process that new actors are forked from. The exit code
is 1 if any run ended differently from the undisturbed one; the directory of such a run is kept.
"""
