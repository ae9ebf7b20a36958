"""``make combinations``: tiny runs with random settings of every table, each run twice.

The second run has other numbers of actors, other values of settings that must not change results,
and either an actor that is killed or a SIGTERM, after which it is resumed. Both must give the same
weights, selections and metrics. Settings come from the schema, so that a new one is tried without
being listed anywhere. With ``--plans`` it prints plans of published models with random settings and
checks their numbers.
"""
