"""``make soak``: many small runs with random faults in each, compared with undisturbed ones.

Everything about run i of a seed is drawn from the two: its settings (as they are, with
``explore_ahead``, with two replicas of the learner, with both), one fault or two, what each hits,
how, and when, out of all moments of the undisturbed run with these settings. Half of the second
faults come while the first one is being recovered from. A row per run is kept in
OUT/faults.jsonl, so that a soak that was stopped (exit code 130) continues where it was. All runs
share one Ray, its processes, and one process that new actors are forks of. Exit code 1 when a run
ended otherwise than the undisturbed one; its directory is kept.
"""
